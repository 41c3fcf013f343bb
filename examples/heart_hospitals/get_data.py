"""Make heart.npz of the four processed.*.data files of UCI's heart disease data set: python
get_data.py FOLDER DATA_DIR.
"""

import sys
from pathlib import Path

import numpy as np

FILES = ("cleveland", "hungarian", "switzerland", "va")


def main(folder: Path, into: Path) -> None:
    """Write DATA_DIR/heart.npz: 13 measurements (NaN = missing), disease
    present or not, hospital.
    """
    x, y, client = [], [], []
    for hospital, name in enumerate(FILES):
        path = folder / f"processed.{name}.data"
        if not path.exists():
            sys.exit(
                f"{path} is not there; download it from "
                "https://archive.ics.uci.edu/dataset/45/heart+disease"
            )
        for line in path.read_text().split():
            numbers = [np.nan if word == "?" else float(word) for word in line.split(",")]
            x.append(numbers[:13])
            y.append(int(numbers[13] > 0))
            client.append(hospital)
    into.mkdir(parents=True, exist_ok=True)
    np.savez(
        into / "heart.npz",
        x=np.array(x),
        y=np.array(y),
        client=np.array(client),
        test=np.zeros(len(y), bool),
    )
    print(f"{into / 'heart.npz'}: {len(y)} patients of {len(FILES)} hospitals")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
