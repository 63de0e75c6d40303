#!/usr/bin/env python3
"""Writes the *.parquet files of this folder with pyarrow:

    pip install pyarrow && python3 test/recorded/parquet/make_parquet.py        (made with 26.0.1)

Each file has the column `text` of parquet_texts.json, which this script also writes, in a different encoding. Files
named refused_* use features that the reader does not support.
"""
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet

DATA = Path(__file__).parent
words = random.Random(5)
# Repeated and empty texts, single nulls and runs of nulls, multi-byte characters, one text larger than a page.
TEXTS = [words.choice(["", "one", "two\nlines", "drei äöü", "四 \U0001f600", None, None]) for _ in range(300)]
TEXTS += [f"text number {i} of some" for i in range(200)] + [None] * 40 + ["x" * 3000, "end"]


def write(name, texts=tuple(TEXTS), nullable=True, **options):
    texts = [text for text in texts if nullable or text is not None]
    schema = pyarrow.schema([pyarrow.field("id", pyarrow.int64()), pyarrow.field("text", pyarrow.string(), nullable),
                             pyarrow.field("score", pyarrow.float32())])
    columns = [list(range(len(texts))), texts, [0.5] * len(texts)]
    table = pyarrow.table([pyarrow.array(column, field.type) for column, field in zip(columns, schema)], schema=schema)
    options = {"compression": "none", "row_group_size": 250, "data_page_size": 600, "write_statistics": False,
               "store_schema": False, **options}
    pyarrow.parquet.write_table(table, DATA / f"{name}.parquet", **options)


def main():
    (DATA / "parquet_texts.json").write_text(json.dumps([text for text in TEXTS if text is not None]) + "\n")
    write("plain", use_dictionary=False)
    write("plain_v2", use_dictionary=False, data_page_version="2.0")
    write("dictionary")
    write("dictionary_v2_zstd", data_page_version="2.0", compression="zstd")
    # The dictionary is full after a few values, so PLAIN pages follow the pages with indices.
    write("fallback_snappy", compression="snappy", dictionary_pagesize_limit=200)
    write("required_gzip", nullable=False, compression="gzip", write_page_checksum=True)
    write("snappy_v2", use_dictionary=False, data_page_version="2.0", compression="snappy", version="1.0")
    few = ["a", "b", None]
    write("refused_brotli", few, compression="brotli")
    write("refused_lz4", few, compression="lz4")
    write("refused_delta", few, use_dictionary=False, column_encoding={"text": "DELTA_LENGTH_BYTE_ARRAY"})
    nested = pyarrow.table({"text": [["a", "b"], ["c"]], "deep": [{"text": "d"}, {"text": "e"}]})
    pyarrow.parquet.write_table(nested, DATA / "refused_nested.parquet", compression="none")


if __name__ == "__main__":
    main()
