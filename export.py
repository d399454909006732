"""The folder that other programs load.                                            Read 6 of 8.

What it is. `BiEncoder.save_pretrained` leaves a folder that these read, with the same vectors:

    BiEncoder.from_pretrained(folder)   this repository
    SentenceTransformer(folder)         or, with a vector per token, MultiVectorEncoder(folder)
    AutoModel, PeftModel                the bare network; with LoRA an adapter to it, or merged

transformers and peft write the network and the tokenizer. The rest, step by step:

    1) write_settings: how tokens become a vector, in the files of sentence-transformers:
           modules.json                        the steps: network, pooling, unit length
           sentence_bert_config.json           the network's: length, what goes where
           1_Pooling/, 2_Normalize/config.json the other two's
           config_sentence_transformers.json   prompts, similarity, Matryoshka sizes
       read_settings is the way back, for these folders and for many others
    2) model_card: README.md, for a stranger: what the model is, how to use it, how it was made
    3) verify: load the folder again, here and in sentence-transformers if it is installed, and
       compare vectors

What it costs. verify takes nothing of the GPU: a few samples are computed in host memory, which
holds two copies of the model at a time, in float32 (2 billion weights: twice 8 GB). bf16 would
round differently in every program, by far more than the 1e-5 that is allowed.

What differs all the same. A run in bf16 rounds a base below its adapter; others load the base as it
is, so that only merged weights are exactly what was trained. SentenceTransformer may read ""
otherwise and, for Qwen3-VL, special tokens spelled in a text (here they are plain words), a text
too long to stand beside its image, strips of images, and a dict whose text comes first.
"""
import contextlib
import copy
import json
import logging
import math
import os
import sys
from pathlib import Path
from string import Template

import torch
from huggingface_hub import snapshot_download
from peft import PeftModel
from torch import nn
from transformers import AutoModel, AutoProcessor
from transformers.utils import logging as bars

# Our names of the poolings and those in their files, where a vector for each token has none.
POOLING = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken", "tokens": None}
HALF = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}        # of autocast
TOLERANCE = 1e-5
REMEDY = ("Do not hand this folder on. Try another version of that program; with an adapter, "
          "--merge-lora. Checkpoints resume from other files and are not affected")


# --- The folder -----------------------------------------------------------------------------------

@contextlib.contextmanager
def quiet(always=True):
    """Without the libraries' progress bars and sentence-transformers' advice, which would stand in
    a run's log once for each save. always=False leaves the bars to a terminal: a large model takes
    its time to load."""
    shown, advisor = bars.is_progress_bar_enabled(), logging.getLogger("sentence_transformers")
    level = advisor.level
    if always or not sys.stderr.isatty():
        bars.disable_progress_bar()
    advisor.setLevel(logging.ERROR)
    try:
        yield
    finally:
        advisor.setLevel(level)
        if shown:
            bars.enable_progress_bar()


@quiet()
def write_folder(model, directory, merge_lora=False, card=None, place=None):
    """A BiEncoder -> its folder.

    With LoRA it holds the adapter in peft's format and the name of its base, or, if the base has no
    place of its own (the tiny model), its weights in base/. That name is an absolute path:
    read_folder still reads a folder that has moved, other programs do not.

    merge_lora   write one plain float32 model instead
    card         what model_card is told, to write README.md
    place        where the folder will be renamed to, as a checkpoint is
    """
    model.processor.save_pretrained(directory)
    write_settings(directory, model)
    backbone, base = model.backbone, model.backbone.name_or_path
    if model.lora and not merge_lora:
        if not base:
            base = str(Path(place or directory, "base").absolute())
            host_copy(backbone).unload().save_pretrained(Path(directory, "base"))
        backbone.peft_config["default"].base_model_name_or_path = base
        backbone.save_pretrained(str(directory), save_embedding_layers=False)
    else:
        backbone = host_copy(backbone) if model.lora or model.half else backbone
        (backbone.merge_and_unload() if model.lora else backbone).save_pretrained(directory)
    if card is not None:                                # instead of the one that peft leaves
        text = model_card(model, merged=merge_lora, **card)
        Path(directory, "README.md").write_text(text, "utf-8")


@quiet(always=False)
def read_folder(name_or_path, options, trust_remote_code=False):
    """Folder or hub name -> (backbone, processor, options) for BiEncoder's constructor.

    options: the caller's; what is None or missing comes from the folder's files. Raises OSError
    when there is no such model, ValueError for one that is not supported.
    """
    if not (folder := Path(name_or_path)).is_dir():
        try:
            folder = Path(snapshot_download(str(name_or_path), allow_patterns=["*.json"]))
        except Exception as error:
            raise OSError(f"{name_or_path}: no such folder, nor on the hub: {error}") from error
    options = read_settings(folder) | {k: v for k, v in options.items() if v is not None}
    name = base = str(folder.absolute()) if folder == Path(name_or_path) else name_or_path
    bundled = folder / "base"
    if adapted := (adapter := folder / "adapter_config.json").is_file():
        base = json.loads(adapter.read_text("utf-8"))["base_model_name_or_path"]
        base = str(bundled) if bundled.is_dir() else base
    # Below adapters the base is frozen, so its half form is all that is ever used.
    half = HALF.get(options.get("dtype")) if adapted or options.get("lora_r") else None
    backbone = AutoModel.from_pretrained(base, dtype=half or torch.float32,
                                         trust_remote_code=trust_remote_code)
    if adapted:
        backbone.name_or_path = "" if base == str(bundled) else base        # "": save it again
        backbone = PeftModel.from_pretrained(backbone, name, is_trainable=True)
    return backbone, AutoProcessor.from_pretrained(
        name, trust_remote_code=trust_remote_code), options


def host_copy(module):
    """A copy of a module in host memory, in float32; of the GPU's it takes nothing."""
    copied = {id(p): nn.Parameter(p.detach().to("cpu", torch.float32, copy=True), p.requires_grad)
              for p in module.parameters()}
    # deepcopy takes what it is given here for copies that it has made already.
    return copy.deepcopy(module, copied).to("cpu", torch.float32)               # and small buffers


# --- 1) Settings ---------------------------------------------------------------------------------

def write_settings(folder, model):
    """The files of sentence-transformers for `model`, so that they give its vectors."""
    several = model.pooling == "tokens"
    # A bf16 base below an adapter would else be used in bf16. Whoever wants that can still say so.
    text = {"max_seq_length": model.max_length, "do_lower_case": False,
            "model_args": {"dtype": "float32"}}
    if model.chat:                                      # everything goes through the chat template
        how = {"method": "forward", "method_output_name": "last_hidden_state"}
        how = {"text": how, "image": how, "message": {**how, "format": "structured"}}
        text |= {"module_output_name": "token_embeddings", "modality_config": how,
                 "processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}
    middle = "multi_vector_encoder.modules.MultiVectorMask" if several else "models.Pooling"
    modules = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
               for i, (path, kind) in enumerate((("", "models.Transformer"), ("1_Pooling", middle),
                                                 ("2_Normalize", "models.Normalize")))]
    pooling = {f"pooling_mode_{flag}": model.pooling == ours for ours, flag in POOLING.items()
               if flag} | {"word_embedding_dimension": model.dim}
    # `encode` without a task then means a document there, as it does here. The last key is ours:
    # what they do not know they ignore.
    main = {"model_type": "MultiVectorEncoder" if several else "SentenceTransformer",
            "prompts": model.prompts, "default_prompt_name": "document",
            "similarity_fn_name": "maxsim" if several else "cosine",
            "matryoshka_dims": model.matryoshka_dims}
    unit = {"module_input_name": "token_embeddings" if several else "sentence_embedding"}
    for name, content in (("modules", modules), ("sentence_bert_config", text),
                          ("1_Pooling/config", {"skiplist_words": []} if several else pooling),
                          ("2_Normalize/config", unit), ("config_sentence_transformers", main)):
        path = Path(folder, f"{name}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def read_settings(folder):
    """The files of sentence-transformers in a folder -> constructor options; {} without
    modules.json. Raises ValueError for what BiEncoder would compute differently."""
    def read(*name):
        return json.loads(p.read_text("utf-8")) if (p := Path(folder, *name)).is_file() else {}
    if not (modules := {m["type"].rpartition(".")[2]: m["path"] for m in read("modules.json")}):
        return {}
    text, config = read("sentence_bert_config.json"), read("config_sentence_transformers.json")
    middle = "MultiVectorMask" if "MultiVectorMask" in modules else "Pooling"
    pooling = read(modules.get(middle, "1_Pooling"), "config.json")
    # Before version 6 a flag per mode, since then one name.
    flags = [key[13:] for key, on in pooling.items() if key.startswith("pooling_mode_") and on]
    mode = ("tokens" if middle != "Pooling" else
            pooling.get("pooling_mode") or "+".join(flags) or "mean")
    ours = [name for name, theirs in POOLING.items() if mode in (name, theirs)]
    # What changes the tokens, or leaves some of them out, on one side or on both.
    refused = {"do_lower_case", "query_length", "document_length", "query_expansion",
               "skiplist_words", "keep_only_token_ids"}
    if (not ours or any((text | pooling).get(key) for key in refused)
            or pooling.get("include_prompt") is False
            or modules.keys() | {"Normalize"} != {"Transformer", middle, "Normalize"}):
        raise ValueError(f"{folder}: unsupported modules {[*modules]} or settings {pooling} {text}")
    prompts = config.get("prompts") or {}
    default = prompts.get(config.get("default_prompt_name"))
    return {"pooling": ours[0], "max_length": text.get("max_seq_length"),
            "query_prompt": prompts.get("query") or default, "max_num_visual_tokens": None,
            "document_prompt": prompts.get("document") or prompts.get("passage") or default,
            "matryoshka_dims": config.get("matryoshka_dims")}


# --- 2) The model card ---------------------------------------------------------------------------

# Its programs run as they are, once the path is put in. Values go in as JSON, which is valid YAML:
# no line of it opens with a back tick, so no prompt and no argument can leave its fence.
CARD = """\
---
library_name: sentence-transformers
pipeline_tag: feature-extraction
tags: [sentence-transformers]$base_model
---
# Embedding model

- base: $base
- weights: $weights
- input: $input; at most $length tokens
- output: $dim numbers of length 1$shorter
- pooling: $pooling; similarity: $similarity
- prompts, $place:

```json
$prompts
```
## Use
```python
from sentence_transformers import $library

model = $library("path/to/this/folder")
queries = model.encode_query(["how do bees find home"])
documents = model.encode_document(["Honey bees navigate by the sun.", "Rates rise."])
print(model.similarity(queries, documents))
```
```python
from model import BiEncoder                 # of the repository that trained it

model = BiEncoder.from_pretrained("path/to/this/folder")
queries = model.encode(["how do bees find home"], "query")
documents = model.encode(["Honey bees navigate by the sun.", "Rates rise."], "document")
print(queries.shape, documents.shape)
```
The network alone, whose `last_hidden_state` is what is pooled:
```python
from transformers import AutoModel
$network
```
## Training
Data: $data

$results
```json
$arguments
```
"""
WHOLE = 'network = AutoModel.from_pretrained("path/to/this/folder", dtype="float32")'
ADAPTER = """from peft import PeftConfig, PeftModel
base = PeftConfig.from_pretrained("path/to/this/folder").base_model_name_or_path
network = AutoModel.from_pretrained(base, dtype="float32")
network = PeftModel.from_pretrained(network, "path/to/this/folder")"""


def model_card(model, *, base, data, arguments, metrics, merged=False):
    """-> README.md for the folder of `model`: Markdown, with front matter that the hub reads.

    base       folder or hub name of what training started from; None: random weights
    data       the training data, in a line
    arguments  dict of all the run's arguments: with the data they are the recipe
    metrics    {"before": row, "now": row} of evaluations; either may be missing
    merged     saved with merge_lora=True
    It says what the model holds and what it is given, and claims nothing else."""
    # A folder's path means nothing elsewhere, so its last part is enough; a hub name is a link.
    hub = base is not None and not Path(base).is_dir()
    adapter, several = model.lora and not merged, model.pooling == "tokens"
    sizes = " or ".join(map(str, model.matryoshka_dims or ()))
    # One column for each evaluation, one line for each of their numbers.
    rows = [row for row in (metrics.get("before"), metrics.get("now")) if row]
    names = dict.fromkeys(name for row in rows for name in row if name.startswith("eval_"))
    table = [["held out", *(f"step {row['step']}" for row in rows)], ["---"] * (1 + len(rows)),
             *([name, *(f"{row[name]:.4g}" for row in rows)] for name in names)]
    return Template(CARD).substitute(
        base_model=f"\nbase_model: {json.dumps(base)}" if hub else "",
        base=f"`{base if hub else Path(base).absolute().name}`" if base else "none, random weights",
        weights="a LoRA adapter, which loads its base" if adapter else "complete",
        input='text, {"image": PATH} or {"image": PATH, "text": TEXT}' if model.chat else "text",
        place="as system instruction" if model.chat else "put before the text",
        length=model.max_length, dim=model.dim, pooling=model.pooling, data=data,
        shorter=f", or the first {sizes}, divided by their length again" if sizes else "",
        library="MultiVectorEncoder" if several else "SentenceTransformer",
        similarity="MaxSim, with a vector for each token" if several else "cosine",
        network=ADAPTER if adapter else WHOLE,
        prompts=json.dumps(model.prompts, ensure_ascii=False, indent=2),
        results="".join(f"| {' | '.join(cells)} |\n" for cells in table if rows),
        arguments=json.dumps(arguments, indent=2, default=str))


# --- 3) Parity -----------------------------------------------------------------------------------

def verify(model, folder, samples, **options):
    """Load `folder` here and in sentence-transformers; -> largest difference of a vector's number.
    Model, modes and random state stay as they are.

    model    the BiEncoder that was saved there, on any device, in any precision
    samples  {"query": list, "document": list}, a few real ones; a plain text is always added
    options  of both loaders: trust_remote_code
    Raises ValueError if a program fails or a difference is above 1e-5."""
    def ours(dtype):
        again = type(model).from_pretrained(folder, dtype=dtype, load_image=model.load_image,
                                            **options).float()
        again.half = None                               # rounded weights, but float32 arithmetic
        return again

    def theirs():
        other = library(str(folder), device="cpu", local_files_only=True, **options)
        return lambda chosen, side: nn.utils.rnn.pad_sequence([
            torch.as_tensor(vector) for vector in getattr(other, f"encode_{side}")(
                [as_theirs(model, sample, side) for sample in chosen])], True)

    given = {side: [*samples.get(side, ()), "a text"] for side in ("query", "document")}
    name = "MultiVectorEncoder" if model.pooling == "tokens" else "SentenceTransformer"
    # A new adapter draws random numbers, although those of the file replace them at once.
    with torch.random.fork_rng(devices=[]), quiet(), idle_cores():
        expected = host_copy(model)
        # On a CPU there is no FlashAttention, and what was not compiled pads otherwise.
        expected.compiled, expected.attention = False, (
            "eager" if model.attention == "eager" else "sdpa")
        expected.half, dtype = None, next(name for name in HALF if HALF[name] == model.half)
        worst = compare(given, expected, lambda: ours(dtype).encode,
                        f"{folder} in BiEncoder")
        try:
            import sentence_transformers
            library = getattr(sentence_transformers, name)              # the first since version 6
        except (ImportError, AttributeError):
            return worst
        alike = {side: [s for s in chosen if as_theirs(model, s, side) is not None]
                 for side, chosen in given.items()}
        expected = ours("fp32")
        return max(worst, compare(alike, expected, theirs, f"{folder} in {name}"))


@contextlib.contextmanager
def idle_cores():
    """Half of the machine's cores, where torchrun gave each process one: the others wait for us."""
    threads = torch.get_num_threads()
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1:
        torch.set_num_threads(max(threads, (os.cpu_count() or 1) // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def compare(samples, expected, load, where):
    """Largest difference between vectors of the encoder `expected` and of the function that load()
    returns. ValueError, which says `where`, if that is above 1e-5 or no number, or load fails."""
    wanted = [expected.encode(chosen, side, progress=False) for side, chosen in samples.items()]
    try:
        encode = load()
        found = [encode(chosen, side) for side, chosen in samples.items()]
        difference = max((a - b).abs().nan_to_num(math.inf).max().item()
                         for a, b in zip(wanted, found))
    except Exception as error:                          # another's program: it may raise anything
        raise ValueError(f"{where}: {error!r}. {REMEDY}") from error
    if difference > TOLERANCE:
        raise ValueError(f"{where}: a number of a vector differs from the saved model's by "
                         f"{difference:.1e}, allowed is {TOLERANCE:.0e}. {REMEDY}")
    return difference


def as_theirs(model, sample, side):
    """A sample as SentenceTransformer takes it, or None if it reads that one otherwise."""
    sample = sample if isinstance(sample, dict) else {"text": sample}
    text, image = sample.get("text") or "", sample.get("image") or None
    if sample.get("prompt") or not (text or image):
        return None                                 # they have one for all of a side; no tokens
    if not model.chat:
        return text
    words, read = (model.tokenizer(text, add_special_tokens=False, split_special_tokens=split)
                   .input_ids for split in (True, False))
    if words != read:
        return None                                 # a special token spelled
    if image is None:
        return {"text": text}                       # alone, a text may be taken for an address
    image, features = model.load_image(image), model.preprocess(sample, side)
    if (max(image.size) > 200 * min(image.size) or len(features["pixel_values"])
            != model.images.get_number_of_image_patches(image.height, image.width)
            or len(features["input_ids"]) == model.max_length):
        return None                                 # a strip; a text that may have been cut
    return {"image": image, "text": text}           # in the order of our template
