#!/usr/bin/env python3
"""Writes a tiny Hugging Face model with its tokenizer, questions and a text into this folder, and the results of
lm-evaluation-harness into expected.json. test/program/test_eval.py compares them with `eval`, and
test/training/test_answers.cpp each log-likelihood. test/interop/test_lm_eval.py runs the same tasks on an exported
model.

    pip install lm-eval==0.4.13 torch transformers datasets
    python3 test/recorded/lm_eval/make_lm_eval_reference.py
"""
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
POSITIONS, VOCABULARY = 48, 300

# HellaSwag's fields, with everything that its preprocessing changes: titles and other brackets, double spaces, capitals
# of ctx_b, white space at the ends; labels as numbers and text; non-ASCII letters; contexts that exceed the model's.
HELLASWAG = [
    {"ind": 4, "activity_label": "Making tea", "ctx_a": "A woman fills a kettle with water.", "ctx_b": "she",
     "ctx": "A woman fills a kettle with water. she", "split": "val", "source_id": "activitynet~v_1", "label": 1,
     "endings": ["throws the kettle away.", "sings to the dog.", "paints the water red.", "waits until it boils."]},
    {"ind": 5, "activity_label": "Home and Garden", "source_id": "wikihow~5", "label": "0",
     "ctx_a": "[header] How to clean a window [title] Fill a bucket. [step] Use  warm water.", "ctx_b": "", "ctx": "",
     "endings": ["[substeps] Add some soap.  Mix it well. ", "Drink it.", "[title] Leave the house [step] Now.",
                 "Sleep"]},
    {"ind": 6, "activity_label": "Café", "ctx_a": " Der Zug hält in Köln.", "ctx": "", "source_id": "made~6",
     "ctx_b": "éMILE UND ÖZLEM steigen aus, dann", "label": 3,
     "endings": ["fahren sie nach Übersee.", "gehen sie ins Café.", "schläft\u00a0er.\u00a0", "日本語"]},
    {"ind": 7, "activity_label": "Running", "ctx_a": "A man runs. He runs on. " * 12, "ctx_b": "then He Stops",
     "ctx": "", "source_id": "made~7", "label": 2,
     "endings": ["and rests.", "and flies to the moon.", "to drink.", "no [more."]},
    {"ind": 8, "activity_label": "x", "ctx_a": "A\nnew [line\nhere] ends.", "ctx_b": "the", "ctx": "",
     "source_id": "made~8", "label": 0, "endings": ["end", "end of the story", "e", "[x][y] end"]},
]
# The general format: varying numbers of choices, an empty context, and white space at the end of a context.
GENERAL = [
    {"context": "The sky is", "choices": ["blue", "a kind of cheese"], "label": 0},
    {"question": "Two and two make ", "choices": ["four", "five", "a lot of trouble for everyone"], "gold": 1},
    {"query": "", "endings": ["Hello there.", "xqzj", "The man went home."], "label": "2"},
    {"context": "Question: is it true?\nAnswer:\n", "choices": ["yes", "no"], "label": 1},
    {"context": "Tea or coffee \t\u3000", "choices": ["tea", "coffee", "  both", "ça alors"], "label": 3},
    {"context": "On and on and on it goes, and nobody knows why. " * 6, "choices": ["Then it ends.", "On"], "label": 0},
]
TEXT = ("It was a bright cold day in the garden, and the kettle was boiling.\n\n  \"Shall we have tea?\" asked the "
        "woman; the man, who had been running, said that he'd rather drink water.\r\n\tZwölf Boxkämpfer jagen Viktor "
        "quer über den Sylter Deich.\u00a0\u2003日本語の文。\n"
        + "The day went on and on, and 1234 windows were cleaned. " * 5)


def read_lines(path):
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines() if line.strip()]


def general_document(doc):
    """Returns the record as {context, choices, gold}."""
    def only(*names):
        return next(doc[name] for name in names if name in doc)
    return {"query": only("context", "question", "query"), "choices": only("choices", "endings"),
            "gold": int(only("label", "gold"))}


def tasks(general, hellaswag, text):
    """Returns the configurations of the three tasks, with documents in memory."""
    import datasets
    from lm_eval.tasks.hellaswag.utils import process_docs

    def rows(documents):
        return lambda **_: {"test": datasets.Dataset.from_list(documents)}
    choice = {"output_type": "multiple_choice", "test_split": "test", "doc_to_text": lambda doc: doc["query"],
              "doc_to_choice": lambda doc: doc["choices"], "doc_to_target": lambda doc: doc["gold"],
              "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True}
                              for name in ("acc", "acc_norm")]}
    rolling = {"output_type": "loglikelihood_rolling", "test_split": "test", "doc_to_text": "",
               "doc_to_target": lambda doc: doc["page"],
               "metric_list": [{"metric": name} for name in ("byte_perplexity", "bits_per_byte")]}
    fields = ("activity_label", "ctx_a", "ctx_b", "endings")
    hellaswag = [{key: doc[key] for key in fields} | {"label": str(doc["label"])} for doc in hellaswag]
    return [{"task": "general", "custom_dataset": rows([general_document(doc) for doc in general]), **choice},
            {"task": "hellaswag", "custom_dataset": rows(hellaswag), "process_docs": process_docs, **choice},
            {"task": "text", "custom_dataset": rows([{"page": text}]), **rolling}]


def evaluate(directory, general, hellaswag, text, **model_args):
    """Returns lm-evaluation-harness's results for a Hugging Face directory, with the names that `eval` uses."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    model = HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=2, **model_args)
    results = lm_eval.simple_evaluate(model=model, tasks=tasks(general, hellaswag, text), log_samples=True,
                                      bootstrap_iters=2)
    found = {}
    for name in ("general", "hellaswag"):
        numbers = results["results"][name]
        samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
        scores = [[float(answer[0][0]) for answer in sample["resps"]] for sample in samples]
        pairs = [[(argument["arg_0"], argument["arg_1"]) if isinstance(argument, dict) else argument
                  for argument in (sample["arguments"].values() if isinstance(sample["arguments"], dict)
                                   else sample["arguments"])] for sample in samples]
        tokens = [[len(model._encode_pair(context, text)[1] if context else model.tok_encode(text))
                   for context, text in pair] for pair in pairs]
        found[name] = {"acc": numbers["acc,none"], "acc_stderr": numbers["acc_stderr,none"],
                       "acc_norm": numbers["acc_norm,none"], "acc_norm_stderr": numbers["acc_norm_stderr,none"],
                       "log_likelihoods": scores, "tokens": tokens,
                       "characters": [[len(choice) for choice in sample["doc"]["choices"]] for sample in samples]}
    numbers = results["results"]["text"]
    found["text"] = {name: numbers[f"{name},none"] for name in ("byte_perplexity", "bits_per_byte")}
    return found


def strided_loss(directory, text, stride):
    """Returns nats per token with overlapping windows of the model's length; each predicts `stride` more tokens."""
    import torch
    from transformers import AutoTokenizer, GPT2LMHeadModel
    model, tokenizer = GPT2LMHeadModel.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    ids = torch.tensor([tokenizer.bos_token_id, *tokenizer(text)["input_ids"]])
    total, end, count = 0.0, min(POSITIONS, len(ids) - 1), len(ids) - 1
    done = 0
    while done < count:
        begin = max(0, end - POSITIONS)
        with torch.no_grad():
            logits = model(ids[None, begin:end]).logits[0].double().log_softmax(-1)
        total -= sum(logits[i - 1 - begin, ids[i]].item() for i in range(done + 1, end + 1))
        done, end = end, min(end + stride, count)
    return total / count


def make_model():
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel
    tokenizer = ByteLevelBPETokenizer()
    corpus = [TEXT, *(json.dumps(doc, ensure_ascii=False) for doc in HELLASWAG + GENERAL)]
    tokenizer.train_from_iterator(corpus, vocab_size=VOCABULARY, min_frequency=1, special_tokens=["<|endoftext|>"])
    tokenizer.save(str(HERE / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    (HERE / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>",
         "model_max_length": POSITIONS}, indent=2) + "\n")
    torch.manual_seed(5)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=16, n_layer=2, n_head=2,
                                       bos_token_id=end, eos_token_id=end))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln" not in name:
                parameter.normal_(0, 0.15)
    model.save_pretrained(HERE)


def main():
    HERE.mkdir(parents=True, exist_ok=True)
    for name, documents in (("hellaswag.jsonl", HELLASWAG), ("general.jsonl", GENERAL)):
        lines = [json.dumps(doc, ensure_ascii=False) for doc in documents]
        (HERE / name).write_text("\n".join(lines) + "\n", "utf-8")
    (HERE / "text.txt").write_bytes(TEXT.encode())
    make_model()
    found = evaluate(HERE, GENERAL, HELLASWAG, TEXT)
    found["text"]["loss_with_stride"] = {stride: strided_loss(HERE, TEXT, stride) for stride in (POSITIONS, 16, 1)}
    lines = [f" {json.dumps(name)}: {json.dumps(of)}" for name, of in found.items()]
    (HERE / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    (HERE / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
