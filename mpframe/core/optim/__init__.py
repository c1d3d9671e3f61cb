"""From the gradients of a backward pass to the weights, in fp32 and all or nothing."""
