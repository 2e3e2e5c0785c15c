"""When the last event of a run was written, so that a resumed run's relative x-axis has no pause in it."""

import struct
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tensorboard.compat.proto.event_pb2 import Event

LENGTH = struct.Struct("<Q")
CHECKSUM_BYTES = 4  # after the length, and after the content
LARGEST_READ = 65536  # bytes; an event with images is longer, and events with numbers stand beside it


def last_wall_time(run_dir: Path, last_step: int) -> float | None:
    """The latest wall time, in seconds, of the events up to `last_step`, without step 0; None if there are none."""
    times = [
        event.wall_time
        for path in run_dir.glob("events.out.tfevents.*")
        for event in read_events(path)
        if 0 < event.step <= last_step and event.HasField("summary")
    ]
    return max(times, default=None)


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file, except large ones, up to where a kill cut it off, or a crash of the machine left zeros.

    TensorBoard's own reader compares checksums in Python, which takes a second for each megabyte.
    """
    with path.open("rb") as file:
        while len(length := file.read(LENGTH.size)) == LENGTH.size:
            (size,) = LENGTH.unpack(length)
            file.seek(CHECKSUM_BYTES, 1)
            if size > LARGEST_READ:
                file.seek(size + CHECKSUM_BYTES, 1)
                continue
            content = file.read(size)
            if len(content) < size:
                return
            try:
                event = Event.FromString(content)
            except DecodeError:
                return
            yield event
            file.seek(CHECKSUM_BYTES, 1)
