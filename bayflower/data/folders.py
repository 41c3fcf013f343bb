"""Data sets with natural owners, in their original files: FEMNIST as LEAF's JSON files, by writer;
CelebA as photographs and lists.

FEMNIST (Caldas et al. 2018, LEAF): `data_dir/femnist/`, in it `train/` and `test/`, or `all_data/`,
or the files themselves, also below `data/`; each *.json is {"users": [...], "num_samples": [...],
"user_data": {user: {"x": [[784 numbers in 0..1], ...], "y": [...]}}}.

CelebA (Liu et al. 2015): `data_dir/celeba/`, in it `img_align_celeba/*.jpg`,
`list_attr_celeba.txt`, `identity_CelebA.txt` and, if it is to mark test samples,
`list_eval_partition.txt`. Labels are the attribute Smiling; photographs are brought to 84×84, and
read when a client that has them is made, as all 202,599 would need 4 GB. Like LEAF we leave out
people with fewer than 5 photographs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError

FEMNIST_CLASSES, SIDE = 62, 28
CELEBA_SIDE, FEWEST = 84, 5
FOLDERS = {"femnist": "femnist", "celeba": "celeba"}  # name of a data set → its folder in data_dir

# x, y, number of classes, owner, test
Parts = tuple[Any, np.ndarray, int, np.ndarray, np.ndarray | None]


def folder_of(name: str, data_dir: str) -> Path | None:
    """Return the folder of a data set's original files; None if there is none."""
    path = Path(data_dir) / FOLDERS[name] if name in FOLDERS else None
    return path if path is not None and path.is_dir() else None


def read_folder(name: str, folder: Path) -> Parts:
    """Return (x, y, number of classes, owner of each sample, test marks or None)."""
    return femnist(folder) if name == "femnist" else celeba(folder)


# -- FEMNIST -------------------------------------------------------------------------------------
def femnist(folder: Path) -> Parts:
    """Return LEAF's FEMNIST: images 28×28 of type uint8, 62 classes, writers numbered in the order
    of their names.
    """
    marked = {path: path.parent.name == "test" for path in _leaf_files(folder)}
    x, y, writer, test = [], [], [], []
    for path, is_test in marked.items():
        for user, images, labels in _leaf_users(path):
            x.append(images)
            y.append(labels)
            writer += [user] * len(labels)
            test += [is_test] * len(labels)
    if not writer:
        raise ConfigError(
            f"the JSON files in {folder} hold no sample; make them with LEAF's preprocess.sh"
        )
    owner = np.unique(np.array(writer), return_inverse=True)[1].astype(np.int64)
    marks = np.array(test, bool)
    return (
        np.concatenate(x),
        np.concatenate(y),
        FEMNIST_CLASSES,
        owner,
        marks if marks.any() and not marks.all() else None,
    )


def _leaf_files(folder: Path) -> list[Path]:
    """Return the JSON files: of train/ and test/ where they are, else of all_data/, else of the
    folder.
    """
    for place in (folder, folder / "data"):
        for names in (("train", "test"), ("all_data",), (".",)):
            found = [path for name in names for path in sorted((place / name).glob("*.json"))]
            if found:
                return found
    raise ConfigError(
        f"no *.json in {folder}, its train/, test/, all_data/ or below its data/; make them with "
        "LEAF's preprocess.sh"
    )


def _leaf_users(path: Path) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return (user, images, labels) of all users in one file."""
    try:
        content = json.loads(path.read_text())
        users, data = content["users"], content["user_data"]
        found = [
            (str(user), np.asarray(data[user]["x"], np.float64), np.asarray(data[user]["y"]))
            for user in users
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{path} is not a file of LEAF's FEMNIST ({type(error).__name__}: {reason}); it needs "
            "users and user_data"
        ) from error
    result = []
    for user, x, y in found:
        if not len(y):
            continue
        if x.shape != (len(y), SIDE * SIDE) or not ((x >= 0) & (x <= 1)).all():
            raise ConfigError(
                f"x of {user!r} in {path} must be {len(y)} lists of {SIDE * SIDE} numbers in [0, "
                f"1], got shape {x.shape}"
            )
        if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= FEMNIST_CLASSES:
            raise ConfigError(
                f"y of {user!r} in {path} must be integers in [0, {FEMNIST_CLASSES - 1}], got "
                f"{y.min()} to {y.max()}"
            )
        images = np.rint(x * 255).astype(np.uint8).reshape(-1, SIDE, SIDE)
        result.append((user, images, y.astype(np.int64)))
    return result


# -- CelebA --------------------------------------------------------------------------------------
class Photographs:
    """Image files with the interface of an array (N, side, side, 3) of type uint8. A file is read
    when it is indexed.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(self, paths: list[Path], side: int) -> None:
        self.paths, self.shape = paths, (len(paths), side, side, 3)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        from PIL import Image  # comes with torchvision

        side, found = self.shape[1], np.zeros((len(indices), *self.shape[1:]), np.uint8)
        for place, number in enumerate(indices):
            try:
                with Image.open(self.paths[number]) as image:
                    found[place] = np.asarray(
                        image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
                    )
            except OSError as error:
                raise ConfigError(
                    f"{self.paths[number]} cannot be read as an image ({type(error).__name__}); "
                    "fetch it again"
                ) from error
        return found


def celeba(folder: Path) -> Parts:
    """Return CelebA: photographs of 84×84 pixels, labelled smiling or not, grouped by person.

    People with fewer than 5 photographs get id −1.
    """
    images = folder / "img_align_celeba"
    if not images.is_dir():
        raise ConfigError(
            f"no folder {images}; CelebA needs img_align_celeba/, list_attr_celeba.txt and "
            f"identity_CelebA.txt in {folder}"
        )
    smiles = _smiles(folder / "list_attr_celeba.txt")
    people = _pairs(folder / "identity_CelebA.txt")
    names = sorted(smiles.keys() & people.keys())
    if not names:
        raise ConfigError(
            f"list_attr_celeba.txt and identity_CelebA.txt in {folder} have no file name in common"
        )
    missing = [name for name in (names[0], names[-1]) if not (images / name).is_file()]
    if missing:
        raise ConfigError(
            f"no file {images / missing[0]}, which the lists name; unpack img_align_celeba.zip "
            "there"
        )
    owner = np.array([people[name] for name in names], np.int64)
    _, place, count = np.unique(owner, return_inverse=True, return_counts=True)
    owner[count[place] < FEWEST] = -1
    test = None
    if (folder / "list_eval_partition.txt").is_file():
        part = _pairs(folder / "list_eval_partition.txt")
        test = np.array([part.get(name, 0) == 2 for name in names])
    y = np.array([smiles[name] for name in names], np.int64)
    return Photographs([images / name for name in names], CELEBA_SIDE), y, 2, owner, test


def _smiles(path: Path) -> dict[str, int]:
    """Return file name → 1 if the attribute Smiling is 1, 0 if it is −1."""
    lines = _lines(path)
    names = lines[1].split() if len(lines) > 1 else []
    if "Smiling" not in names:
        raise ConfigError(
            f"the second line of {path} must name the attributes, Smiling among them, got "
            f"{' '.join(names)[:60]!r}"
        )
    column, found = names.index("Smiling") + 1, {}
    for number, line in enumerate(lines[2:], 3):
        words = line.split()
        if len(words) != len(names) + 1 or words[column] not in ("1", "-1"):
            raise ConfigError(
                f"line {number} of {path} must be a file name and {len(names)} times 1 or -1, got "
                f"{line[:60]!r}"
            )
        found[words[0]] = int(words[column] == "1")
    return found


def _pairs(path: Path) -> dict[str, int]:
    """Return file name → the number after it."""
    found = {}
    for number, line in enumerate(_lines(path), 1):
        words = line.split()
        if len(words) != 2 or not words[1].isdigit():
            raise ConfigError(
                f"line {number} of {path} must be a file name and a number, got {line[:60]!r}"
            )
        found[words[0]] = int(words[1])
    return found


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise ConfigError(f"no file {path}; it is part of CelebA's download")
    return [line for line in path.read_text().splitlines() if line.strip()]
