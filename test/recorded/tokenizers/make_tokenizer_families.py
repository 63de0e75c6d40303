#!/usr/bin/env python3
"""Writes small tokenizers of each family, and the results of Hugging Face's tokenizers library for some texts.

    pip install tokenizers && python3 test/recorded/tokenizers/make_tokenizer_families.py

tokenizer_families.json    {"texts": [...], "families": {name: {"tokenizer": a tokenizer.json, "ids": [...] of the
                           texts, "pieces": bytes of their pre-tokens, "decoded": [...] (null: the text itself)}}}
test/data/tokenizer/test_tokenizer_families.cpp compares with this file. test/interop/test_tokenizers.py compares other
texts with the library.
"""
import json
import pathlib
import random
import re
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

DATA = pathlib.Path(__file__).parent
WORDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
REST = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
LLAMA3, QWEN2 = WORDS + "\\p{N}{1,3}" + REST, WORDS + "\\p{N}" + REST
QWEN3_5 = QWEN2.replace("?\\p{L}+", "?[\\p{L}\\p{M}]+").replace("[^\\s\\p{L}", "[^\\s\\p{L}\\p{M}")
UPPER, LOWER = "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]", "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
LEAD, CONTRACTION = "[^\\r\\n\\p{L}\\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (f"{LEAD}{UPPER}*{LOWER}+{CONTRACTION}|{LEAD}{UPPER}+{LOWER}*{CONTRACTION}|\\p{{N}}{{1,3}}"
         "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")
DEEPSEEK = ["\\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
            "| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"]
SPACES = "\t\n\v\f\r   \x85\xa0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000"
SCRIPTS = [
    "The quick brown fox jumps over the lazy dog. Naïve café — „Straße“ œuvre, İstanbul ıǅ.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.", "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "نص حكيم له سر قاطع وذو شأن عظيم ١٢٣٤", "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण १२३", "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "다람쥐 헌 쳇바퀴에 타고파", "视野无限广，窗外有蓝天。他说：「你好」！\n　第二段。", "いろはにほへと ちりぬるを カタカナ",
    "யாமறிந்த மொழிகளிலே தமிழ்மொழி", "ვეპხის ტყაოსანი შოთა რუსთაველი", "Բել դղյակի ձախ ժամն օֆ ազգությանը", "ሰላም ለዓለም"]


def random_text(length, seed):
    """Returns white space, ASCII, contractions, and all categories of Unicode 3.2, which all libraries support."""
    rng = random.Random(seed)
    categories = {}
    for code in range(0x30000):
        category = unicodedata.ucd_3_2_0.category(chr(code))
        if category not in ("Cn", "Cs", "Co") and unicodedata.category(chr(code)) == category:
            categories.setdefault(category, []).append(chr(code))
    kinds = [SPACES, "\r\n /", [chr(c) for c in range(33, 127)], "aAbB1 '",
             ["'s", "'t", "'re", "'VE", "'m", "'ll", "'D", "'ſ", " 's", "''ve"], *categories.values()]
    return "".join(rng.choice(rng.choice(kinds)) for _ in range(length))


def texts():
    return [
        "", " ", "a", "\n\n\n", "   x   y", "it's they'll 'twas I'VE rock'n'roll ''s 'S DON'T 'ſ S's X'ſ",
        "x\u00a0\u3000 y\u2003\u2003z \u180e \u200b", "tabs\t\tand  spaces \r\n  at the end   ", "end.\n\n  \n",
        "word" * 30,
        "1234567890 12 3,14 ¼ ² Ⅷ ٣٤٥٦ 0x1F a1b22c333", *SCRIPTS, "😀👩‍👩‍👧 👍🏽🇩🇪 ❤️‍🔥 1️⃣",
        "#include <vector>\nint main() {\n\tfor (auto& x : v) { x += 0x1F; }  // TODO\n\treturn !v.empty();\n}\n",
        "def camelCaseHTTPServer2(self, *args):\r\n    return f\"{args!r}\"  # ok\r\n\r\n/path/to/file://\n//\n/x",
        "".join(map(chr, range(1, 0x20))) + "\x7f\x80\x85\x9f\ufeff\ufffd\U000e0001",
        "e\u0301 é a\u0323\u0302 ậ \u1112\u1161\u11ab 한 \u212b \u2126 q\u0307\u0323 \u0344 \u0958 가\u11a8",
        "\u0301start, A\u0301A \u0301b \u0301\u0301 Aa\u0301A ǅǅa ʰʰA", "▁spaced▁out ▁ word", random_text(700, 1),
        "in\x04 thße wor\x02ld\x05\x06 \x04",
        "say <tool_call> now<tool_call>, <|endoftext|>x <|im_start|> y  <|pad|>  z</s><s> <|begin_of_text|>!"]


def byte_level(size, split, corpus, special, template=None, normalizer=None, added=(), ignore_merges=False,
               alphabet=()):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=2, show_progress=False,
                                  initial_alphabet=[*(alphabet or pre_tokenizers.ByteLevel.alphabet())])
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens(list(added))
    if template:
        tokenizer.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{template} $A", special_tokens=[
                (template, tokenizer.token_to_id(template))])])
    return tokenizer


def splits(*patterns, **options):
    steps = [pre_tokenizers.Split(Regex(pattern), **{"behavior": "isolated", **options}) for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def digits(individual):
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=individual),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


def sentencepiece(size, corpus, metaspace):
    """Like Llama 2's tokenizer.json: merges of characters, U+2581 for spaces, and a token for each byte."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=2, show_progress=False, limit_alphabet=130)
    trained.train_from_iterator(corpus, trainer)
    model = json.loads(trained.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].get)
    # Tokens for runs of spaces, as in Llama 2.
    merges = [*model["merges"], ["▁", "▁"], ["▁▁", "▁▁"]]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "▁▁", "▁▁▁▁"]
    names = dict.fromkeys(name for name in names if not {"\r", "\n"} & set(name))
    vocabulary = {name: i for i, name in enumerate(names)}
    merges = [merge for merge in merges if "".join(merge) in vocabulary]
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge) for merge in merges], byte_fallback=True, fuse_unk=True,
                                     unk_token="<unk>"))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)
                                  for token in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def families(corpus, size=420):
    """Returns tokenizers with `size` tokens plus special tokens."""
    end, im = "<|endoftext|>", ["<|im_start|>", "<|im_end|>"]
    # As in SmolLM2's vocabulary, some bytes have no token: here control characters and bytes missing in Cyrillic.
    plain = [re.sub("[^\n -~а-я]", "", text) for text in corpus]
    isolating = splits(LLAMA3, behavior="removed", invert=True)
    gap = json.loads(byte_level(size, isolating, corpus, [end, "<|pad|>"]).to_str())
    for token, distance in zip(gap["added_tokens"], (1, 6)):  # cl100k skips ids before its special tokens
        token["id"] += distance
        gap["model"]["vocab"][token["content"]] = token["id"]
    return {
        "gpt2": byte_level(size, pre_tokenizers.ByteLevel(add_prefix_space=False), corpus, [end]),
        "llama3": byte_level(size, splits(LLAMA3), corpus, ["<|begin_of_text|>", "<|end_of_text|>"],
                             "<|begin_of_text|>", ignore_merges=True),
        "qwen2": byte_level(size, splits(QWEN2), corpus, [end, *im], normalizer=normalizers.NFC(),
                            added=[AddedToken("<tool_call>", special=False, normalized=False)]),
        "qwen3_5": byte_level(size, splits(QWEN3_5), corpus, [end, *im], normalizer=normalizers.NFC()),
        "cl100k": Tokenizer.from_str(json.dumps(gap)),
        "o200k": byte_level(size, splits(O200K), corpus, [end]),
        "smollm2": byte_level(size, digits(True), corpus, [end, *im]),
        "smollm2_missing_bytes": byte_level(size, digits(True), plain, [end, *im], alphabet="a"),
        "digit_runs": byte_level(size, digits(False), corpus, [end]),
        "deepseek": byte_level(size, splits(*DEEPSEEK), corpus, [end]),
        "stripping": byte_level(size, splits(QWEN2), corpus, [end], added=[
            AddedToken("<|pad|>", special=True, lstrip=True, rstrip=True), AddedToken("<|im_start|>", lstrip=True),
            AddedToken("<tool_call>", normalized=True), AddedToken("  "), AddedToken("<tool")]),
        "llama2": sentencepiece(size - 90, corpus, metaspace=False),
        "llama2_metaspace": sentencepiece(size - 90, corpus, metaspace=True)}


def ids_of(tokenizer, text):
    tokenizer.encode_special_tokens = True  # like other text
    return tokenizer.encode(text, add_special_tokens=False).ids


def pieces_of(tokenizer, text):
    """Returns the bytes of each pre-token."""
    if tokenizer.pre_tokenizer is None or tokenizer.normalizer or tokenizer.get_vocab().get("<0x00>"):
        return None
    offsets = [end for _, (_, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    return [len(text[begin:end].encode()) for begin, end in zip([0, *offsets], offsets)]


def main():
    some = texts()
    corpus = [(DATA / "tokenizer_corpus.txt").read_text(encoding="utf-8"), *some[:-3], *SCRIPTS]
    result = {}
    for name, tokenizer in families(corpus).items():
        ids = [ids_of(tokenizer, text) for text in some]
        result[name] = {"tokenizer": json.loads(tokenizer.to_str()), "ids": ids,
                        "pieces": [pieces_of(tokenizer, text) for text in some],
                        "decoded": [tokenizer.decode(one, skip_special_tokens=False) for one in ids]}
        for i, text in enumerate(some):
            if result[name]["decoded"][i] == text:
                result[name]["decoded"][i] = None  # the text itself
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one, separators=(',', ':'))}" for name, one in result.items())
    (DATA / "tokenizer_families.json").write_text(
        '{"texts": ' + json.dumps(some) + ',\n"families": {\n' + lines + "\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
