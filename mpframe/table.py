"""Tables of texts, aligned for a terminal or as Markdown. The first row is the head."""

from collections.abc import Collection, Sequence

Rows = Sequence[Sequence[str]]


def aligned(rows: Rows, right: Collection[int] = ()) -> str:
    """Pad the cells of each column to one width; the columns in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def markdown(rows: Rows, right: Collection[int] = ()) -> str:
    """A Markdown table. A bar in a cell is escaped, and a line break becomes a space."""
    head, *body = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    rule = ["---:" if column in right else "---" for column in range(len(head))]
    first, *others = (f"| {' | '.join(row)} |" for row in (head, *body))
    return "\n".join([first, f"|{'|'.join(rule)}|", *others])
