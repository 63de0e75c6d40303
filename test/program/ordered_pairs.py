"""Multiple-choice questions whose accuracy of 1 shows that `eval` orders completions like given log-likelihoods."""
import json


def ordered_pairs(question, log_likelihoods, gap=1e-3):
    """Returns a question for each two neighbors in the order of log-likelihoods that differ by more than `gap`."""
    choices = "choices" if "choices" in question else "endings"
    label = "gold" if "gold" in question else "label"
    ranked = sorted(zip(log_likelihoods, question[choices], strict=True), reverse=True)
    pairs = [(better, worse) for (more, better), (less, worse) in zip(ranked, ranked[1:]) if more - less > gap]
    return [{**question, choices: [worse, better] if i % 2 else [better, worse], label: i % 2}
            for i, (better, worse) in enumerate(pairs)]


def as_lines(records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
