"""The model. Nothing in it is about precision: that is the choice of `dtype`."""

from torch import Tensor, nn


class Net(nn.Module):
    """Two hidden layers of `width` features, and an output for each class."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.head = nn.Linear(width, classes)

    def forward(self, points: Tensor) -> Tensor:
        """Points [N, 2] to logits [N, classes]."""
        logits: Tensor = self.head(self.body(points))
        return logits
