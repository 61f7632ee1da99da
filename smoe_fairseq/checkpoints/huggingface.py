"""``smoe export --to huggingface``: a folder that transformers' ``from_pretrained`` loads."""

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import torch
from fairseq import tasks
from omegaconf import OmegaConf
from torch import Tensor

from smoe_fairseq.checkpoints import huggingface_m2m_export as m2m
from smoe_fairseq.checkpoints.content import fingerprint
from smoe_fairseq.checkpoints.model import LOSS_WEIGHTS, check_fit, known_options, plain_config
from smoe_fairseq.checkpoints.reading import PLUGINS, saved_task
from smoe_fairseq.checkpoints.sets import weights_of
from smoe_fairseq.checkpoints.tensors import blocks, save_tensors, to_half, unique_tensors
from smoe_fairseq.checkpoints.trained_with import dictionary_mismatch
from smoe_fairseq.compat.patches_training import STOCK_LAYER_COPIES
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import read_plain, whole_folder
from smoe_fairseq.flags import values_of
from smoe_fairseq.forms import IDENTITY, SCORES, read_json
from smoe_fairseq.models.options import SMoETransformerConfig
from smoe_fairseq.modules.losses import parse_weights
from smoe_fairseq.subwords import checked_subwords, has_nmt_pieces
from smoe_fairseq.translate import load

WEIGHTS = "model.safetensors"
FILES = {  # of an export
    *(WEIGHTS, "README.md", "config.json", "generation_config.json", "spm.model", "vocab.json"),
    *("target_vocab.json", "tokenizer_config.json", "special_tokens_map.json"),
    "sentencepiece.bpe.model",
}
SEARCH = {  # the defaults of `smoe translate`
    "num_beams": 5,
    "early_stopping": True,
    "length_penalty": 1.0,
    "min_new_tokens": 1,
    "max_length": 202,  # with the first token and the end of sentence
}


def write_huggingface(run: Path, output: Path, force: bool, half: bool, data: Path | None) -> None:
    """Write the folder ``output``: weights, settings, tokenizer, and a model card.

    Args:
        run: a run's folder, a checkpoint, or the name of a set of ``--expert-parallel``.
        force: whether an existing folder is replaced.
        data: folder of the dictionaries; by default that of the checkpoint, or of the training data.
        half: see `to_half`; a loaded model computes in float32 by default.

    Raises:
        UsageError: a file is missing or damaged, the model or its text is not supported, the folder cannot
            be written, or see `to_half`.
    """
    from transformers import GenerationConfig

    path = load.checkpoint_of(run) if run.is_dir() else run
    state = weights_of(path)
    task = task_of(path, state, data)
    options, weights = plain_config(known_options(path, state)), state["model"]
    del options["_name"]
    text = m2m.Text.of(task, options, weights)
    if text is not None:
        config = m2m.config_of(options, len(text.rows))
        tensors = m2m.weights_of(path, config, weights, text.rows)
    else:
        config = _config_of(options, state, task)
        tensors = _weights_of(path, config, weights)
    config.dtype = str(tensors[next(iter(tensors))].dtype).removeprefix("torch.")
    if half:
        tensors = to_half(path, tensors)
        config.dtype = "float32"
    search = SEARCH | {"suppress_tokens": [config.pad_token_id]}
    search |= {f"{n}_token_id": getattr(config, f"{n}_token_id") for n in ("bos", "eos", "pad")}
    search["decoder_start_token_id"] = config.decoder_start_token_id
    search["forced_eos_token_id"] = config.eos_token_id  # at the maximum length
    search["max_length"] = min(search["max_length"], options["max_target_positions"] + 1)
    for part, module in getattr(config, "plugins", {}).items():
        print(f"{output}: its {part} is of {module}; import that before from_pretrained")
    with whole_folder(output, force, f"--output {output}") as partial:
        save_tensors(tensors, str(partial / WEIGHTS))
        config.save_pretrained(partial)
        if text is not None:
            text.write(partial, options["max_source_positions"])
            pairs = [pair.split("-") for pair in task.lang_pairs]
            card = _card(output, path, pairs, "dense", "", *text.example(*pairs[0]))
        else:
            tokenizer = _tokenizer_of(path, state, task, config, partial)
            language = tokenizer.tgt_lang
            if tokenizer.decoder_langtok and language:
                search["forced_bos_token_id"] = tokenizer.get_lang_id(language)
            tokenizer.save_pretrained(partial)
            card = _card(output, path, *_example(config, tokenizer))
        GenerationConfig(**search).save_pretrained(partial)
        (partial / "README.md").write_text(card, "utf-8")


def is_export(folder: Path) -> bool:
    """Whether `write_huggingface` has written a folder."""
    try:
        config = read_json(folder / "config.json")
    except UsageError:
        return False
    return config.get("model_type") == "smoe_transformer" or bool(config.get("smoe_fairseq"))


def task_of(path: Path, state: Mapping, data: Path | None):
    """The task that the checkpoint was trained for, with its dictionaries."""
    cfg = values_of(state.get("cfg"))
    saved, name = saved_task(state)
    values = values_of(saved)
    if name not in ("translation", "translation_multi_simple_epoch"):
        raise UsageError(
            f"{path} is of the task {name}; expected translation or translation_multi_simple_epoch"
        )
    for option in ("tokenizer", "bpe"):
        kind = values_of(cfg.get(option)).get("_name")
        if kind not in (None, "sentencepiece"):
            raise UsageError(f"{path}: --{option} {kind} is not supported; expected sentencepiece")
    if values.get("lang_tok_replacing_bos_eos"):
        raise UsageError(f"{path}: --lang-tok-replacing-bos-eos is not supported")
    data = load.data_of(path, values, data)
    values = {**values, "_name": name, **load.text_settings(data, values)}
    if isinstance(saved, Namespace):
        options = Namespace(**{"task": name, **values})
    else:
        options = OmegaConf.create(values)
    with load.knowing_direction(data, f"the data that {path} was trained with"):
        task = tasks.setup_task(options)
    if message := dictionary_mismatch(path, state, task):
        raise UsageError(message)
    rows = len(state["model"].get("encoder.embed_tokens.weight", ()))
    if rows not in (0, len(task.source_dictionary)):
        raise UsageError(
            f"{path} was trained with dictionaries of {rows} tokens, and those in {data} have "
            f"{len(task.source_dictionary)}: expected the folder of its training (--data)"
        )
    return task


def _config_of(options: Mapping, state: Mapping, task):
    from smoe_fairseq.huggingface import SMoEConfig  # imports transformers

    source, target = task.source_dictionary, task.target_dictionary
    criterion = values_of(values_of(state.get("cfg")).get("criterion") or state.get("args"))
    weights = {
        f"router_{theirs}_loss_coef": float(criterion[f"moe_{ours}_loss_wt"])
        for theirs, ours in LOSS_WEIGHTS.items()
        if criterion.get(f"moe_{ours}_loss_wt") is not None
    }
    return SMoEConfig(
        **options,
        **weights,
        label_smoothing=float(criterion.get("label_smoothing") or 0),
        vocab_size=len(target),
        source_vocab_size=len(source),
        moe_blocks=blocks(SMoETransformerConfig(**options), state["model"]),
        moe_losses=parse_weights(criterion.get("moe_losses") or ""),
        plugins=dict(state.get(PLUGINS, {})),
        bos_token_id=target.bos(),
        pad_token_id=target.pad(),
        eos_token_id=target.eos(),
        decoder_start_token_id=target.eos(),
        architectures=["SMoEForConditionalGeneration"],
    )


def _weights_of(path: Path, config, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the file, each once; raises UsageError unless they fit the model."""
    from smoe_fairseq.huggingface import SMoEForConditionalGeneration  # imports transformers

    with torch.device("meta"):
        target = SMoEForConditionalGeneration(config)
    tied = target._tied_weights_keys
    tensors, _ = unique_tensors(
        {n: t for n, t in model.items() if n not in tied and not n.endswith((*STOCK_LAYER_COPIES,))}
    )
    check_fit(path, tensors, {n: t for n, t in target.state_dict().items() if n not in tied})
    return tensors


def _tokenizer_of(path: Path, state: Mapping, task, config, folder: Path):
    """The tokenizer; its files are written to ``folder``."""
    from smoe_fairseq.huggingface import SMoETokenizer  # imports transformers

    files = {}
    for name, file, dictionary in (
        ("vocab_file", "vocab.json", task.source_dictionary),
        ("target_vocab_file", "target_vocab.json", task.target_dictionary),
    ):
        if name == "vocab_file" or dictionary.symbols != task.source_dictionary.symbols:
            content = json.dumps(dictionary.symbols, ensure_ascii=False, indent=0)
            (folder / file).write_text(content, "utf-8")
            files[name] = folder / file
    args = getattr(task, "args", None)
    data = str((args or task.cfg).data)
    if has_nmt_pieces(task.source_dictionary):
        raise UsageError(f"{data} has subwords of subword-nmt: expected sentencepiece's, or words")
    if subwords := checked_subwords(data, task.source_dictionary):
        (folder / "spm.model").write_bytes(read_plain(subwords))
        files["sp_model_file"] = folder / "spm.model"
    if not hasattr(task, "data_manager"):
        source, target = task.cfg.source_lang, task.cfg.target_lang
        languages = {"src_lang": source, "tgt_lang": target, "lang_pairs": [f"{source}-{target}"]}
    else:
        from fairseq.data.multilingual.multilingual_utils import get_lang_tok

        source_token, target_token = args.langtoks["main"]
        pairs = [pair.split("-") for pair in task.lang_pairs]
        sources, targets = ({pair[i] for pair in pairs} for i in (0, 1))
        languages = {
            "language_tokens": {
                lang: token
                for lang in task.langs
                if (token := get_lang_tok(lang, args.lang_tok_style, "main"))
                in task.target_dictionary
            },
            "encoder_langtok": source_token,
            "decoder_langtok": bool(target_token),
            "lang_pairs": list(task.lang_pairs),
            "src_lang": sources.pop() if len(sources) == 1 else None,
            "tgt_lang": targets.pop() if len(targets) == 1 else None,
        }
    return SMoETokenizer(
        **{name: str(file) for name, file in files.items()},
        **languages,
        model_max_length=config.max_source_positions,
    )


def _example(config, tokenizer) -> tuple[list[list[str]], str, str, str, str]:
    """The arguments of `_card` from ``pairs`` on, for a model of ours."""
    pairs = [pair.split("-") for pair in tokenizer.lang_pairs]
    if len(pairs) == 1:  # codes may have hyphens
        pairs = [[tokenizer.src_lang, tokenizer.tgt_lang]]
    strata = sorted({str(block["strata"]) for block in config.moe_blocks.values()})
    kind = f"{len(config.moe_blocks)} MoE layers, strata {', '.join(strata)}" if strata else "dense"
    before = "import smoe_fairseq.huggingface  # makes the Auto classes know the model\n"
    before += "".join(f"import {module}\n" for module in dict.fromkeys(config.plugins.values()))
    choice = forced = ""
    if tokenizer.language_tokens:
        choice = 'tokenizer.src_lang, tokenizer.tgt_lang = "{}", "{}"\n'.format(*pairs[0])
    if tokenizer.decoder_langtok:
        forced = ", forced_bos_token_id=tokenizer.get_lang_id(tokenizer.tgt_lang)"
    return pairs, kind, before, choice, forced


def _card(
    output: Path,
    checkpoint: Path,
    pairs: list[list[str]],
    kind: str,
    before: str,
    choice: str,
    forced: str,
) -> str:
    """The model card: what the folder is, how to load it, and the run's scores.

    Args:
        pairs: source and target language of each direction.
        kind: of the model.
        before, choice, forced: lines of the example that import and choose languages, and the argument of
            ``generate`` for the target language.
    """
    languages = sorted({language for pair in pairs for language in pair})
    if len(pairs) <= 20:
        kind += f"; {', '.join(map('-'.join, pairs))}"
    head = [f"language: {json.dumps(languages)}", "library_name: transformers"]
    head += ["pipeline_tag: translation", "tags: [smoe-fairseq]"]
    return f"""---
{chr(10).join(head)}
---

# {output.name}

A translation model trained with smoe-fairseq ({kind}), languages {", ".join(languages)}.

```python
{before}from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{output.name}")
model = AutoModelForSeq2SeqLM.from_pretrained("{output.name}")
{choice}batch = tokenizer(["..."], return_tensors="pt", padding=True)
print(tokenizer.batch_decode(model.generate(**batch{forced}), skip_special_tokens=True))
```

{_scores(checkpoint)}{_training(checkpoint.parent)}"""


def _scores(path: Path) -> str:
    """A table of the run's ``scores.json``, or a sentence if it has none of this checkpoint."""
    try:
        content = read_json(path.parent / "scores.json", SCORES)
        scores, own = content["scores"], {path.name: fingerprint(path)}
        if content["checkpoint"] != path.name or content.get("contents", own) != own:
            raise KeyError(path.name)
        others = dict.fromkeys(m for score in scores.values() for m in score.get("others") or {})
        rows, signatures = [], {}
        for direction, score in scores.items():
            by_metric = {"BLEU": (score["bleu"], score["signature"])}
            by_metric |= {metric: score["others"][metric] for metric in others}
            cells = [f"{value:.2f}" for value, _ in by_metric.values()]
            rows.append(f"| {direction} | {' | '.join(cells)} | {score['sentences']} |")
            for metric, (_, signature) in by_metric.items():
                signatures.setdefault(f"{metric}: `{signature}`")
        checkpoint, search = content["checkpoint"], content["generate"]
    except (UsageError, KeyError):  # missing, of another checkpoint, or not for all directions
        return "This checkpoint has not been evaluated.\n"
    names = ["direction", "BLEU", *others, "sentences"]
    table = "\n".join([f"| {' | '.join(names)} |", "|---" * len(names) + "|", *rows])
    return f"Scores of `{checkpoint}`, with `{search}`:\n\n{table}\n\n{'; '.join(signatures)}\n"


def _training(run: Path) -> str:
    """The flags with which a recipe trained the run; empty if no recipe did."""
    try:
        flags = read_json(run / "identity.json", IDENTITY)["flags"]
    except UsageError:
        return ""
    lines = [f"{name} {value}".rstrip() for name, value in flags.items()]
    return "\n".join(["\nHow it was trained:\n", "```", *lines, "```", ""])
