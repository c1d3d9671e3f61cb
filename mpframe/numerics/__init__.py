"""What precision does to your numbers: observed, explained, searched and simulated.

    ranges      how large the numbers of every layer are: ranges, exponents, range_record,
                range_watch (the callback), range_pictures, gradient_picture
    noise       what quantisation takes from each operand: product_noise, noise_picture
    autopsy/    why a step failed, found by replaying it
    doctor/     what will go wrong, before training
    search      which modules must stay in fp32
    simulation  what another loss scaler would have done

Begin with exponents.py, then ranges.py. optimizer_numbers.py knows which of an optimizer's numbers
a format loses; remedies.py puts pins and moved ops into words for the command line.

Imports `training` and all below it; `build` and the programs in `cli` use it.
"""
