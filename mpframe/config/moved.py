"""The new names of what a `_target_` of version 0.1.0 named, in one table."""

_WORKLOADS = {
    "detection.data": ["data.scenes", "data.MeanAveragePrecision"],
    "detection.model": ["models.ssd", "objectives.detection"],
    "gan": [
        *("data.adversarial", "data.digits_gan", "models.gan"),
        *("objectives.adversarial.discriminator_objective",),
        *("objectives.adversarial.generator_objective",),
    ],
    "segmentation.data": ["data.mask_folder", "data.shapes", "data.segmentation"],
    "segmentation.model": ["models.unet", "objectives.dice_cross_entropy"],
    "speech": ["data.phonemes", "data.LabelErrorRate", "models.lstm", "objectives.ctc"],
    "tables.data": ["data.csv_table"],
    "tables.model": ["models.tabular", "objectives.LogRegression"],
    "text.classification": ["data.text_folder"],
    "text.language_model": ["data.next_token", "models.gpt"],
    "text.tweets": ["data.tweet_spans", "data.WordJaccard"],
}

_HOUSE = {
    "core.loss_scaling": [
        f"loss_scaling.{name}" for name in ("Static", "Backoff", "LogMax", "auto", "none")
    ],
    "core.objective": ["objectives.supervised", "objectives.model_loss"],
    "training.objectives": [
        f"{old}.{name}"
        for old in ("objectives", "core.objective")
        for name in ("cross_entropy", "mse")
    ],
    "training.schedules": [
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
    f"mpframe.{old}": f"mpframe.{module}.{old.rpartition('.')[2]}"
    for module, names in {**{f"workloads.{k}": v for k, v in _WORKLOADS.items()}, **_HOUSE}.items()
    for old in names
}
"""Old name to new."""
