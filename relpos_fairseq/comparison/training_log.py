"""What fairseq-train logs (--log-format json): curves, speed, parameters."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass, field

LINE = re.compile(r"\bINFO \| (train_inner|train|valid\d*) \| (\{.*\})\s*$")
PARAMETERS = re.compile(r"num\. shared model params: ([\d,]+)")


@dataclass
class TrainingLog:
    """Numbers of a training, line by line; after a resumption later lines replace earlier ones."""

    parameters: int = 0  # of the model
    speeds: list[float] = field(default_factory=list)  # tokens a second, of every line of training
    epochs: list[float] = field(default_factory=list)  # likewise, of every epoch
    # updates to all that a validation logged
    valid: dict[int, dict[str, float]] = field(default_factory=dict)
    newest: str = ""  # the last line of training, for the eye

    def read(self, line: str) -> None:
        if match := PARAMETERS.search(line):
            self.parameters = int(match[1].replace(",", ""))
        if (match := LINE.search(line)) is None:
            return
        part, values = match[1], json.loads(match[2])
        if part == "train_inner":
            self.speeds.append(float(values["wps"]))
            self.newest = f"update {values['num_updates']}, training loss {values['loss']}"
        elif part == "train":  # an epoch's end
            self.epochs.append(float(values["train_wps"]))
        else:
            updates = int(values[f"{part}_num_updates"])
            found = {name: float(value) for name, value in values.items() if name != "epoch"}
            self.valid.setdefault(updates, {}).update(found)

    @property
    def speed(self) -> int:
        """Tokens a second in the median."""
        return round(statistics.median(self.speeds or self.epochs or [0.0]))
