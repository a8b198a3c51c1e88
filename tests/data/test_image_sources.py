"""Labelled image sets: each supported format is read, and invalid data is refused in one sentence."""

import io

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from lit_layers.data.images import EncodedPictures, ImageSource, SmallPictures, decoded, image_source
from lit_layers.errors import InputError

SIZE, CLASSES = 6, 3


def pixels(count: int = 9, size: int = SIZE, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def encoded(image: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "png")
    return stream.getvalue()


def write_parquet(folder, split: str, images: list[bytes], labels: list, columns=("image", "label")) -> None:
    folder.mkdir(exist_ok=True)
    rows = [{"bytes": image, "path": None} for image in images]
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    table = pyarrow.table({columns[0]: pyarrow.array(rows, kind), columns[1]: labels})
    pyarrow.parquet.write_table(table, folder / f"{split}-00000-of-00001.parquet")


def write_folders(root, size: int = 80, classes=("cat", "dog"), each: int = 2) -> None:
    for number, split in enumerate(("train", "val")):
        for label, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for index, image in enumerate(pixels(each, size, seed=10 * number + label)):
                Image.fromarray(image).save(root / split / name / f"{index}.png")


def write_arrays(folder, train: tuple, test: tuple) -> str:
    """Write images (images, height, width[, 3]) and labels of both splits as parquet files."""
    for split, (images, labels) in {"train": train, "test": test}.items():
        write_parquet(folder, split, [encoded(image) for image in images], np.asarray(labels).tolist())
    return str(folder)


def small(source: ImageSource, split="train") -> SmallPictures:
    pictures = source.split(split)
    assert isinstance(pictures, SmallPictures)
    return pictures


def test_every_fifth_digit_of_a_class_is_a_test_image_and_no_pixel_is_lost():
    source, digits = image_source("digits"), load_digits()
    train, test = small(source), small(source, "test")
    assert len(train) + len(test) == 1797
    num_seen: dict[int, int] = {}
    expected = {"train": [], "test": []}
    for index, label in enumerate(digits.target):
        num_seen[label] = num_seen.get(label, 0) + 1
        expected["test" if num_seen[label] % 5 == 0 else "train"].append(index)
    for name, pictures in (("train", train), ("test", test)):
        levels = digits.images[expected[name]]
        torch.testing.assert_close(pictures.pixels[:, 0].double() / 255 * 16, torch.tensor(levels), atol=0.04, rtol=0)
        assert pictures.labels.tolist() == digits.target[expected[name]].tolist()
        assert (pictures.pixels == pictures.pixels[:, :1]).all()
    assert source.classes == tuple("0123456789")


def test_parquet_files_give_their_original_images_and_large_ones_stay_encoded(tmp_path):
    images, labels = pixels(), np.arange(9) % CLASSES
    source = image_source(write_arrays(tmp_path / "small", (images, labels), (images, labels)))
    source.check()
    assert torch.equal(small(source).pixels, torch.from_numpy(images).permute(0, 3, 1, 2))
    assert small(source).labels.tolist() == [0, 1, 2] * 3
    assert source.classes == ("0", "1", "2")
    images = pixels(3, size=70)
    pictures = image_source(write_arrays(tmp_path / "large", (images, range(3)), (images, range(3)))).train
    assert isinstance(pictures, EncodedPictures)
    assert np.array_equal(np.asarray(pictures.picture(2)), images[2])


def test_folders_of_classes_are_read_in_the_order_of_their_names(tmp_path):
    write_folders(tmp_path)
    source = image_source(str(tmp_path))
    source.check()
    assert isinstance(source.train, EncodedPictures)
    names = [f"train/{name}/{number}.png" for name in ("cat", "dog") for number in (0, 1)]
    assert [source.train.rows(row) for row in range(len(source.train))] == [tmp_path / name for name in names]
    assert source.train.labels.tolist() == [0, 0, 1, 1]
    assert source.classes == ("cat", "dog")
    assert np.array_equal(np.asarray(source.test.picture(3)), pixels(2, 80, seed=11)[1])


def test_equal_images_have_equal_hashes_and_one_pixel_changes_them(tmp_path):
    images = pixels()
    changed = images.copy()
    changed[4, 0, 0, 0] ^= 1
    hashes = []
    for number, each in enumerate((images, images, changed)):
        write_parquet(tmp_path / str(number), "train", [encoded(image) for image in each], [0, 1, 2] * 3)
        hashes.append(image_source(str(tmp_path / str(number))).train.content_hash())
    assert hashes[0] == hashes[1] != hashes[2]


def refusal(source: ImageSource) -> str:
    with pytest.raises(InputError) as raised:
        source.check()
    return str(raised.value)


def test_the_error_of_a_folder_names_its_defect(tmp_path):
    write_folders(tmp_path)
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"no image")
    with pytest.raises(InputError, match="cat/0.png is no image that can be"):
        image_source(str(tmp_path)).train.picture(0)
    (tmp_path / "train" / "dog").rename(tmp_path / "train" / "emu")
    assert "class 'dog' is not in both train and" in refusal(image_source(str(tmp_path)))
    for file in (tmp_path / "val" / "dog").iterdir():
        file.unlink()
    assert "no valid file for the classes dog" in refusal(image_source(str(tmp_path)))
    (tmp_path / "val").rename(tmp_path / "other")
    assert "expected a folder val (or test) beside train" in refusal(image_source(str(tmp_path)))


def test_the_error_of_a_table_names_its_defect(tmp_path):
    cases = [
        ([0, 1, 2], [0, 1, 1], ("image", "label"), "class '2' is not in both splits"),
        ([0, 2, 2], [0, 2, 2], ("image", "label"), "class '1' is not in both splits"),
        ([0, -1, 2], [0, 1, 2], ("image", "label"), "row 1 of train has -1"),
        ([0, 1, 2], [0, 1, 2], ("photo", "label"), "expected image or img or jpg or png (images)"),
        ([0, 1, 2], [0, 1, 2], ("image", "kind"), "expected label or labels"),
        ([0, 1, None], [0, 1, 2], ("image", "label"), "has the label None"),
    ]
    images = [encoded(image) for image in pixels(3)]
    for number, (train, test, columns, sentence) in enumerate(cases):
        write_parquet(tmp_path / str(number), "train", images, train, columns)
        write_parquet(tmp_path / str(number), "test", images, test, columns)
        assert sentence in refusal(image_source(str(tmp_path / str(number))))


def test_a_row_with_an_unreadable_image_or_another_size_is_named(tmp_path):
    images = [encoded(image) for image in pixels(3)]
    write_parquet(tmp_path / "broken", "train", [images[0], images[1][:40], images[2]], [0, 1, 2])
    with pytest.raises(InputError, match="row 1 of .*broken is no image that can be read"):
        _ = image_source(str(tmp_path / "broken")).train
    write_parquet(tmp_path / "odd", "train", [*images[:2], encoded(pixels(1, size=5)[0])], [0, 1, 2])
    with pytest.raises(InputError, match="row 2 of .*odd is 5 x 5 px where the first image is 6 x 6"):
        _ = image_source(str(tmp_path / "odd")).train


def test_an_unknown_source_a_damaged_file_and_a_missing_split_are_refused(tmp_path):
    for name in ("cifar11", "/nowhere/images", "./nowhere"):
        with pytest.raises(InputError, match="expected digits, cifar10, cifar100, an existing path or ORG/NAME"):
            image_source(name)
    with pytest.raises(InputError, match="'nobody/nothing' is no local path and cannot be had from the Hub"):
        _ = image_source("nobody/nothing").train
    (tmp_path / "train-0.parquet").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"the parquet files of .* cannot be read \(ArrowInvalid: .*: copy them again"):
        _ = image_source(str(tmp_path)).train
    write_parquet(tmp_path / "half", "train", [encoded(image) for image in pixels(3)], [0, 1, 2])
    with pytest.raises(InputError, match="half: expected a split validation or valid or test, it has train"):
        _ = image_source(str(tmp_path / "half")).test
    with pytest.raises(InputError, match="holds no parquet files and no train/CLASS"):
        image_source(str(tmp_path / "half" / "train-00000-of-00001.parquet"))


def hub_rows(images: np.ndarray, labels: list[int]):
    features = datasets.Features({"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["x", "y", "z"])})
    content = {"img": [{"bytes": encoded(image), "path": None} for image in images], "fine_label": labels}
    return datasets.Dataset.from_dict(content, features=features)


def test_a_data_set_of_the_hub_gives_its_held_out_split_and_class_names(monkeypatch):
    asked = []

    def load(path, config):
        asked.append((path, config))
        parts = {"train": (0, [2, 1, 0]), "validation": (1, [0, 1, 2]), "test": (2, [0, 0, 0])}
        return {name: hub_rows(pixels(3, seed=seed), labels) for name, (seed, labels) in parts.items()}

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = image_source("some/images:fine")
    source.check()
    assert torch.equal(small(source, "test").pixels, torch.from_numpy(pixels(3, seed=1)).permute(0, 3, 1, 2))
    assert source.train.labels.tolist() == [2, 1, 0]
    assert source.classes == ("x", "y", "z")
    assert set(asked) == {("some/images", "fine")}


EVERY_MODE = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I", "F", "I;16", "LAB")


def test_every_pixel_mode_is_converted_or_refused_by_name():
    levels = np.array([[0, 255], [85, 170]], dtype=np.uint8)
    for mode in EVERY_MODE:
        image = Image.new(mode, (2, 2)) if mode in ("LAB", "I;16") else Image.fromarray(levels).convert(mode)
        raw = io.BytesIO()
        image.save(raw, "TIFF" if mode in ("CMYK", "F", "LAB", "I") else "PNG")
        if mode in ("I", "F", "I;16", "LAB"):
            with pytest.raises(InputError, match=f"x has pixels of the kind {mode}, not of 8 bits in RGB or grey"):
                decoded(raw.getvalue(), "x")
            continue
        expected = np.asarray(image.convert("L")) if mode in ("1", "P") else levels
        assert np.array_equal(np.asarray(decoded(raw.getvalue(), "x")), np.stack([expected] * 3, -1)), mode


def test_an_image_is_rotated_as_datasets_does_and_loses_its_transparency():
    rng = np.random.default_rng(0)
    for orientation in range(1, 9):
        image, raw = Image.fromarray(rng.integers(0, 256, (4, 6, 3), dtype=np.uint8)), io.BytesIO()
        exif = image.getexif()
        exif[0x0112] = orientation
        image.save(raw, "PNG", exif=exif)
        expected = datasets.Image().decode_example({"bytes": raw.getvalue(), "path": None})
        assert np.array_equal(np.asarray(decoded(raw.getvalue(), "x")), np.asarray(expected))
    pixels, raw = rng.integers(0, 256, (4, 6, 4), dtype=np.uint8), io.BytesIO()
    Image.fromarray(pixels).save(raw, "PNG")
    assert np.array_equal(np.asarray(decoded(raw.getvalue(), "x")), pixels[..., :3])
