"""Folders of images: one folder a class, or one a site with one a class inside.

    class/file                   --site MANIFEST.csv, with columns file and site, names the sites
    site/class/file
    train/class/file, test/class/file, and both orders with sites

Folders called train, training, val, valid, validation and test are parts, never sites or classes.
Images keep their size if all have the same one of at most 128 pixels; else they are brought to
64×64 (`image_side` sets another side). They are grey if all files are, else RGB. A file is read
when a client that has it is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError
from . import labels
from .cells import IS_MISSING, Column
from .images import Images
from .npz import Options, is_share
from .source import Names, Source
from .tables import read_table

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
TRAIN = ("train", "training", "val", "valid", "validation")
TEST = ("test", "testing")
LARGEST, USUAL = 128, 64
GREY = ("1", "L", "LA")
COLOUR = ("RGB", "RGBA", "P", "CMYK", "YCbCr", "PA")


class Photos(NamedTuple):
    """The images of a folder."""

    root: Path
    files: list[str]  # relative to root
    labels: list[str]
    sites: list[str] | None
    test: np.ndarray | None


class Files:
    """Image files with the interface of an array (N, H, W[, 3]) of type uint8. A file is read when
    it is indexed.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, paths: list[Path], size: tuple[int, int], colour: bool) -> None:
        self.paths, self.colour = paths, colour
        self.shape = (len(paths), *size, *((3,) if colour else ()))
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        found = np.zeros((len(indices), *self.shape[1:]), np.uint8)
        for place, number in enumerate(indices):
            found[place] = pixels(self.paths[number], self.shape[1:3], self.colour)
        return found


def pixels(path: Path, size: tuple[int, ...], colour: bool) -> np.ndarray:
    """Return one image file as (H, W[, 3]) of type uint8."""
    from PIL import Image  # comes with torchvision

    try:
        with Image.open(path) as file:
            image = file.convert("RGB" if colour else "L")
            if image.size != (size[1], size[0]):
                image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
            return np.asarray(image)
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as an image ({type(error).__name__}); remove it, or save it "
            "again"
        ) from None


def listed(root: Path) -> list[str]:
    """Return the image files below a folder, relative to it, in order."""
    found = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    if not found:
        raise ConfigError(
            f"{root} has no image ({', '.join(SUFFIXES[:4])}, …); put the images of each class "
            "into a folder of its own, CLASS/FILE or SITE/CLASS/FILE"
        )
    return sorted(found)


def survey(root: Path) -> Photos:
    """Return the images of a folder with their labels, sites and parts, from the folders' names."""
    files = listed(root)
    folders = [Path(file).parts[:-1] for file in files]
    depth = len(folders[0])
    if odd := next((f for f, one in zip(files, folders, strict=True) if len(one) != depth), None):
        raise ConfigError(
            f"{root} has images at different depths ({files[0]} and {odd}); arrange all as "
            "CLASS/FILE or SITE/CLASS/FILE"
        )
    levels = [[one[level] for one in folders] for level in range(depth)]
    split = [
        level for level, some in enumerate(levels) if {s.lower() for s in some} <= {*TRAIN, *TEST}
    ]
    marks = None
    if len(split) == 1 and depth > 1:
        marks = np.array([name.lower() in TEST for name in levels[split[0]]])
        levels = [some for level, some in enumerate(levels) if level != split[0]]
    if len(levels) not in (1, 2) or len(split) > 1:
        example = files[0]
        raise ConfigError(
            f"{root} has images such as {example}; arrange them as CLASS/FILE or SITE/CLASS/FILE, "
            "with train/ and test/ in front if they are divided"
        )
    sites = levels[0] if len(levels) == 2 else None
    return Photos(root, files, levels[-1], sites, marks)


def opened(paths: list[Path], side: int) -> tuple[Files, str]:
    """Return (the images, a remark on their size); only the heads of the files are read."""
    from PIL import Image

    sizes, modes = set(), set()
    for path in paths:
        try:
            with Image.open(path) as image:
                sizes.add((image.size[1], image.size[0]))
                modes.add(image.mode)
        except (OSError, SyntaxError, ValueError) as error:
            raise ConfigError(
                f"{path} cannot be read as an image ({type(error).__name__}); remove it, or save "
                "it again"
            ) from None
        if image.mode not in (*GREY, *COLOUR):
            raise ConfigError(
                f"{path} has pixels of mode {image.mode}, more than 8 bits; save it with 8 "
                "bits a channel, or give arrays in an .npz file"
            )
    colour = not modes <= set(GREY)
    same = len(sizes) == 1
    largest = max(max(size) for size in sizes)
    if side:
        size = (side, side)
    elif same and largest <= LARGEST:
        size = next(iter(sizes))
    else:
        size = (USUAL, USUAL)
    was = (
        f"{next(iter(sizes))[0]}×{next(iter(sizes))[1]}"
        if same
        else f"{len(sizes)} different sizes"
    )
    remark = "" if sizes == {size} else f"images of {was} brought to {size[0]}×{size[1]} (bilinear)"
    return Files(paths, size, colour), remark


def manifest(path: Path, found: Photos, columns: tuple[str, ...]) -> dict[str, Column]:
    """Return columns of a manifest, a CSV with a column `file`, for each image of a folder."""
    table = read_table(path)
    if "file" not in table.columns:
        raise ConfigError(
            f"{path} needs a column 'file' with the path of each image inside {found.root}, got "
            f"{', '.join(list(table.columns)[:6])}"
        )
    for name in columns:
        if name not in table.columns:
            raise ConfigError(
                f"{path} has no column {name!r}, only {', '.join(list(table.columns)[:8])}"
            )
    names = [str(one).strip() for one in table.columns["file"].texts]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{path} names the file {twice} twice; name each image once")
    place = {name: row for row, name in enumerate(names)}
    if missing := [file for file in found.files if file not in place]:
        raise ConfigError(
            f"{path} does not name {missing[0]}, one of {len(missing)} images of {found.root} "
            "without a row; add them or remove the files"
        )
    rows = np.array([place[file] for file in found.files])
    return {name: table.columns[name].at(rows) for name in columns}


def of_photos(root: Path, options: Options) -> Source:
    """Return the data set in a folder of images."""
    found = survey(root)
    paths = [root / file for file in found.files]
    where, sites, marks = found.labels, found.sites, found.test
    test = "" if is_share(options.test) else options.test
    if options.site and options.site != "off":
        said = manifest(Path(options.site), found, ("site", test) if test else ("site",))
        if (said["site"].kinds == IS_MISSING).any():
            raise ConfigError(f"{options.site} has images without a site; fill in every row")
        sites = [str(text) for text in said["site"].texts]
        marks = labels.marks(said[test], f"column {test!r} of {options.site}") if test else marks
    elif test:
        if not Path(test).is_dir():
            raise ConfigError(f"there is no folder {test} of test images; give a folder or a share")
        more = survey(Path(test))
        if (more.sites is None) != (sites is None):
            raise ConfigError(f"{test} must be arranged as {root} is: with or without sites")
        marks = np.arange(len(paths) + len(more.files)) >= len(paths)
        sites = None if sites is None or more.sites is None else [*sites, *more.sites]
        where = [*where, *more.labels]
        paths += [Path(test) / file for file in more.files]
    x, remark = opened(paths, options.image_side)
    y, names = labels.classes(labels.of_names(where), f"the folders of {root}")
    if options.site == "off":
        sites = None
    owners, known = (None, ()) if sites is None else labels.numbered(labels.of_names(sites))
    return Source(
        root.resolve().name,
        x,
        y,
        len(names),
        owners,
        marks,
        names=Names(known, names),
        images=Images("NHWC" if x.colour else "NHW", 255.0),
        lines=(remark,) if remark else (),
    )
