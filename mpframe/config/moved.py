"""The new name of each `_target_` of version 0.1.0."""

_WORKLOADS = {
    "detection": [
        *("data.scenes", "data.MeanAveragePrecision", "models.ssd SSD", "objectives.detection"),
    ],
    "gan": [
        *("data.adversarial", "data.digits_gan", "models.gan Gan"),
        *("objectives.adversarial.discriminator_objective",),
        *("objectives.adversarial.generator_objective",),
    ],
    "images": ["models.cnn", "models.mlp", "models.resnet18"],
    "segmentation.data": ["data.mask_folder", "data.shapes", "data.segmentation"],
    "segmentation.model": ["models.unet UNet", "objectives.dice_cross_entropy"],
    "speech": ["data.phonemes", "data.LabelErrorRate", "models.lstm LSTM", "objectives.ctc"],
    "tables.data": ["data.csv_table"],
    "tables.model": ["models.tabular Tabular", "objectives.LogRegression"],
    "text.classification": ["data.text_folder"],
    "text.language_model": ["data.next_token", "models.gpt GPT"],
    "text.tweets": ["data.tweet_spans", "data.WordJaccard"],
}

_HOUSE = {
    "core.loss_scaling": [
        f"loss_scaling.{name}" for name in ("Static", "Backoff", "LogMax", "auto", "none")
    ],
    "core.objective": ["objectives.supervised"],
    "training.objectives": [
        f"{old}.{name}"
        for old in ("objectives", "core.objective")
        for name in ("cross_entropy", "mse", "model_loss")
    ],
    "training.callbacks.schedules": [
        *("optim.schedules.constant", "optim.schedules.exponential", "optim.schedules.onecycle"),
        *("optim.schedules.piecewise_constant", "optim.schedules.poly"),
        *("optim.schedules.transformer", "optim.schedules.warmup_cosine"),
    ],
    "lab": ["numerics.watch_ranges"],
    "lab.autopsy.callback": ["numerics.autopsy.callback.Autopsy"],
    "training.callbacks.console": [
        *("training.callbacks.log_lines.LogLines", "training.callbacks.progress_bar.ProgressBar"),
    ],
    "training.callbacks.guards": [
        "training.callbacks.early_stopping.EarlyStopping",
        "training.callbacks.saturation.SaturationWarning",
    ],
    "training.callbacks.step_hooks": ["training.callbacks.larc.LARC"],
    "training.callbacks.records": [
        *("training.callbacks.amax_record.RecordAmax", "training.callbacks.csv_log.CsvLog"),
        "training.callbacks.curves.Curves",
    ],
}

MOVED = {
    f"mpframe.{old}": f"mpframe.{module}.{new or old.rpartition('.')[2]}"
    for module, names in {**{f"workloads.{k}": v for k, v in _WORKLOADS.items()}, **_HOUSE}.items()
    for old, _, new in (name.partition(" ") for name in names)
}
"""Old name to new. In an entry of two words the second is the new last part."""
