"""A recurrent network that gives each frame of a sequence its logits."""

from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mpframe.models.checks import require_dropout, require_sizes


class LSTM(nn.Module):
    """LSTM layers over the frames, and a linear layer on each frame's output.

    The sequences are packed: no step is computed behind the end of one, and the backward direction
    begins at its last frame. So a sequence's logits do not depend on how far it was padded.

    Args:
        features: numbers in a frame.
        classes: outputs for each frame.
        hidden: size of the state in each direction.
        layers: how many LSTM layers, one above the other.
        bidirectional: read each sequence from its end as well.
        dropout: fraction of features dropped before the linear layer, 0 <= dropout < 1.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        hidden: int = 128,
        layers: int = 1,
        bidirectional: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require_sizes(features=features, classes=classes, hidden=hidden, layers=layers)
        require_dropout(dropout)
        self.lstm = nn.LSTM(features, hidden, layers, batch_first=True, bidirectional=bidirectional)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden * (1 + bidirectional), classes)

    def forward(self, inputs: Tensor, lengths: list[int]) -> Tensor:
        """Logits [N, T, classes]; those behind the end of a sequence mean nothing.

        Args:
            inputs: [N, T, features].
            lengths: frames of each sequence, 1 to T; on the host.
        """
        packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=inputs.shape[1]
        )
        logits: Tensor = self.head(self.dropout(states))
        return logits


def lstm(
    features: int,
    classes: int,
    hidden: int = 128,
    layers: int = 1,
    bidirectional: bool = True,
    dropout: float = 0.0,
) -> nn.Module:
    """An `LSTM`."""
    return LSTM(features, classes, hidden, layers, bidirectional, dropout)
