"""A data set of files, read through DataLoader workers."""

import pytest
from PIL import Image


@pytest.fixture
def pictures(tmp_path):
    """37 training and 11 test pictures of two classes, light and dark, of different sizes."""
    for split, count in (("train", 37), ("test", 11)):
        for number in range(count):
            folder = tmp_path / "pictures" / split / ("dark", "light")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            shade = 40 + 150 * (number % 2) + number
            Image.new("RGB", (30 + number, 50), (shade, shade, shade)).save(folder / f"{number}.jpg")
    return tmp_path / "pictures"


def test_images_of_a_csv_file_give_the_numbers_of_a_folder_and_later_ones_need_no_label(train, pictures, tmp_path):
    paths = sorted(pictures.glob("*/*/*.jpg"), key=lambda path: (path.parts[-3:-1], path))
    rows = [f"{path.relative_to(pictures)},{path.parent.name},{path.parts[-3]}" for path in paths]
    (pictures / "labels.csv").write_text("\n".join(["file,label,split", *rows]))
    options = [f"dataset.root={pictures}", "dataset.size=16", "loader.num_workers=0", "trainer.epochs=1"]
    options += ["trainer.batch_size=9", "dataset.cache_dir=decoded"]
    folder = train("dataset=image_folder", *options, "hydra.run.dir=folder")
    listed = train("dataset=image_csv", *options, "hydra.run.dir=listed", "launch=fork", "launch.nproc_per_node=2")
    assert listed.epochs == folder.epochs

    for split in ("train", "test"):
        for name, other in (("dark", "black"), ("light", "white")):
            (tmp_path / "others" / split).mkdir(parents=True, exist_ok=True)
            (tmp_path / "others" / split / other).symlink_to(pictures / split / name)
    others = train("mode=evaluate", "resume=folder", f"dataset.root={tmp_path / 'others'}", code=2)
    assert "class 0 is dark in the training and black in this data; type dataset=" in others.sentence

    new = ["dataset=image_list", f"dataset.root={pictures / 'test'}", "dataset.size=16"]
    for run in ("folder", "listed"):
        train("mode=predict", f"resume={run}", *new)
        header, first, *_ = (tmp_path / run / "predictions.csv").read_text().splitlines()
        assert header == "index,file,prediction,probability_dark,probability_light,truth"
        assert first.startswith("0,dark/0.jpg,")
        assert first.endswith(",")
    unlabelled = train("mode=evaluate", "resume=listed", *new, code=2)
    assert "the target -100" in unlabelled.sentence
