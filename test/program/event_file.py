"""A reader of TensorBoard's event files: framing, checksums and the protobuf fields that test_monitoring looks at."""
import struct
from typing import NamedTuple

POLYNOMIAL = 0x82F63B78  # CRC32C, reversed


def crc_table():
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


TABLE = crc_table()


def masked_crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(data):
    """Yields the payloads; fails if a length, a checksum or the end is wrong."""
    while data:
        size, size_crc = struct.unpack_from("<QI", data)
        assert size_crc == masked_crc32c(data[:8]), "the length's checksum"
        payload = data[12:12 + size]
        assert len(payload) == size and len(data) >= size + 16, "the file ends within a record"
        assert struct.unpack_from("<I", data, 12 + size)[0] == masked_crc32c(payload), "the checksum"
        yield payload
        data = data[16 + size:]


def varint(data, place):
    value = shift = 0
    while True:
        byte = data[place]
        value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            return value, place


def fields(message):
    """Yields (number, value) of each field: an integer, or the bytes of a fixed-size or nested field."""
    place = 0
    while place < len(message):
        key, place = varint(message, place)
        if key & 7 == 0:
            value, place = varint(message, place)
        else:
            size = {1: 8, 5: 4}.get(key & 7)
            if size is None:
                assert key & 7 == 2, f"wire type {key & 7}"
                size, place = varint(message, place)
            value, place = message[place:place + size], place + size
            assert len(value) == size, "a field ends beyond its message"
        yield key >> 3, value


class Value(NamedTuple):
    """A number of a step."""
    step: int
    tag: str
    value: float
    time: float


def one(message, number, default=None):
    return next((value for field, value in fields(message) if field == number), default)


def read(path):
    """Returns a file's values, and the steps at which it records a start or restart of the run."""
    values, starts, version = [], [], None
    for event in records(path.read_bytes()):
        time, = struct.unpack("<d", one(event, 1))
        step = one(event, 2, 0)
        version = version or one(event, 3)
        for field, part in fields(event):
            if field == 7 and one(part, 1) == 1:
                starts.append(step)
            for _, value in fields(part) if field == 5 else ():
                number, = struct.unpack("<f", one(value, 2))
                values.append(Value(step, one(value, 1).decode(), number, time))
    assert version == b"brain.Event:2", version
    return values, starts
