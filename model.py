"""The encoder: a text, an image, or both  ->  one unit vector.                    Read 6 of 8.

What it is. `BiEncoder` puts a pretrained Hugging Face backbone behind the two calls that the rest
needs: `preprocess(one sample) -> features`, in a loader's worker process, and
`forward(list of features) -> (C, D)`, where the gradients are. Two families of backbone:

    Qwen3-VL        a chat: system instruction, then the user's image and text; pooled at the last
                    token of the generation prompt. The format of Qwen3-VL-Embedding
    text encoders   BERT, MiniLM, ModernBERT (mean or first token); decoders such as
                    Qwen3-Embedding (last token, an end token appended once)

How a sample becomes a vector:

    1) preprocess: fit the image into a budget of visual tokens (one is 32 x 32 pixels), tokenize,
       shorten the text to `max_length`. Image tokens and what pooling reads are never cut.
    2) forward: pad the chunk to its own longest sample, on the right. Pixel rows of all images are
       laid end to end; a chunk without an image carries no pixels at all.
    3) run the backbone, under autocast if asked. The region opens and closes inside the call,
       so both passes of the gradient cache compute the same numbers.
    4) pool the hidden states (C, T, D) to (C, D) in float32, and divide by their length. Pooling
       "tokens", for late interaction, keeps all of them: unit vectors, zeros at padding.

What trains. Everything, or with `lora_r` low-rank adapters on the language layers (Hu et al. 2021,
arXiv 2106.09685). Trainable weights are always float32: near 1 a bf16 weight moves in steps of
1/128, and smaller updates round to nothing. A half dtype stores only frozen weights that way.

What it costs. One forward per call. Chunks are planned by `cost(features)`: tokens plus patches.
What is frozen need not be computed twice: the method `see`, and the cache of `frozen_start`.
Refused: videos, several images per sample, further modules (Dense, as in ColBERT's projection).

Letters: C samples in a chunk, T tokens, D embedding size; of images P rows of pixels (16 x 16
patches) with F numbers each, V visual tokens, L language layers that get them, too.
"""
import contextlib
import copy
import math
import re

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from tokenizers.processors import Sequence, TemplateProcessing
from torch import nn
from tqdm import tqdm
from transformers import (Qwen2Tokenizer, Qwen2VLImageProcessor, Qwen3VLConfig, Qwen3VLModel,
                          Qwen3VLProcessor, Qwen3VLVideoProcessor)
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures
from transformers.utils import is_flash_attn_2_available

from export import HALF, POOLING, read_folder, write_folder

DEFAULT_INSTRUCTION = "Represent the user's input."
PIXELS = "pixel_values", "image_grid_thw"               # of one image (P, F) and (1, 3)
MARK = "\ue000"                      # stands for the text while a chat template is rendered


def pool(hidden, mask, pooling):
    """hidden (C, T, D), mask (C, T) of 1 at real tokens -> (C, D), or "tokens" (C, T, D), float32
    or wider. Reads the mask and not the shape, so it is right for padding on either side."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if pooling in ("mean", "tokens"):
        weight = mask.to(wide)[:, :, None]                                              # (C, T, 1)
        return hidden * weight if pooling == "tokens" else (hidden * weight).sum(1) / weight.sum(1)
    # (C,) argmax returns the first of equals: where the mask begins, or where its sum stops growing
    index = (mask if pooling == "cls" else mask.cumsum(1)).argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), index].to(wide)


def clear_rope_deltas(module):
    """Forget the position offset that Qwen's vision models keep from their last image: a later
    call with another batch, or with text alone, must not see it."""
    for part in module.modules():
        if getattr(part, "rope_deltas", None) is not None:
            part.rope_deltas = None


@contextlib.contextmanager
def evaluating(module):
    """Eval mode and no gradient inside; after it, each submodule has the mode it had before."""
    modes = {part: part.training for part in module.modules()}
    try:
        with torch.no_grad():
            yield module.eval()
    finally:
        for part, training in modes.items():
            part.training = training


def open_rgb(image):
    """Path or PIL image -> RGB image. The plain default; train.py passes data.load_image."""
    return (image if isinstance(image, Image.Image) else Image.open(image)).convert("RGB")


def fit_image(image, processor):
    """-> (image, whether the processor may resize it): its tokens stay within processor.size.
    The library's rule is kept wherever it works, so that vectors agree with other programs. It
    refuses sides that differ more than 200-fold and lets strips exceed the budget: those images
    are resized here, to whole units on both sides."""
    unit, (short, long) = processor.patch_size * processor.merge_size, sorted(image.size)
    max_tokens = processor.size["longest_edge"] // unit ** 2
    if long <= 200 * short and (processor.get_number_of_image_patches(image.height, image.width)
                                <= max_tokens * processor.merge_size ** 2):
        return image, True
    scale = min(1, math.sqrt(max_tokens * unit ** 2 / (short * long)))      # never enlarge a strip
    rows = max(1, int(short * scale / unit))
    sides = [unit * rows, unit * max(1, min(int(long * scale / unit), max_tokens // rows))]
    return image.resize(sides if image.width <= image.height else sides[::-1], Image.BICUBIC), False


def append_end_token(tokenizer):
    """Make a tokenizer close every text with its end token, unless it does. Inside of it, because
    truncation then reserves a place for it, and an exported one behaves the same elsewhere."""
    if tokenizer("a").input_ids[-1:] != tokenizer("a", add_special_tokens=False).input_ids[-1:]:
        return
    end, existing = tokenizer.eos_token, tokenizer.backend_tokenizer.post_processor
    if end is None:
        raise ValueError("last-token pooling needs an end token: set the tokenizer's eos_token")
    close = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = Sequence([existing, close]) if existing else close


def lora_layers(backbone, targets, vision):
    """Full names of the linear layers to adapt: those in the stack of language layers, or those
    whose names end in a target (not the vision tower's). A target without a match: ValueError."""
    linear = [name for name, part in backbone.named_modules() if isinstance(part, nn.Linear)
              and (vision or "visual" not in name.split("."))]
    if targets is None:
        return [name for name in linear if re.search(r"\.\d+\.", name) and "merger" not in name]
    found = {t: {name for name in linear if f".{name}".endswith(f".{t}")} for t in targets}
    if not all(found.values()):
        raise ValueError(f"a LoRA target matches no linear layer (lora_vision={vision}): {found}; "
                         f"there are {sorted({name.rpartition('.')[2] for name in linear})}")
    return sorted(set().union(*found.values()))


class BiEncoder(nn.Module):
    """Samples -> unit vectors; the four steps at the top of this file.
    backbone, processor  a Hugging Face model without head; its processor or tokenizer, of which
                         the pixel budget and, if it is missing, the end token are set
    pooling              "mean", "cls" (first token), "last", "tokens"; None: last for decoders
    lora_r, lora_alpha   rank 0 trains every weight; adapters are scaled by alpha / r
    lora_targets         endings of layer names; None: all linear layers of the language model
    lora_vision          adapters on the vision tower, too; freeze_vision: never train it
    max_length           tokens per sample; None: what model and tokenizer allow, at most 8192
    max_num_visual_tokens  of one image
    dtype                "fp32", or "bf16", "fp16": autocast, and frozen weights stored so. With
                         fp16 small gradients become zero, unless the loss is scaled (grad_scale)
    query_prompt, document_prompt  system instruction of a chat, prefix of any other text
    attention            "auto" (see `ready`), or a name that transformers knows
    compile              True (inductor) or a backend of torch.compile, for the language layers
    load_image           path or image -> RGB PIL image
    matryoshka_dims      sizes that its vectors may be cut to: kept with the model, for others"""

    def __init__(self, backbone, processor, *, pooling=None, lora_r=0, lora_alpha=32,
                 lora_dropout=0.0, lora_targets=None, lora_vision=False, freeze_vision=False,
                 max_length=None, max_num_visual_tokens=256, dtype="fp32", query_prompt=None,
                 document_prompt=None, gradient_checkpointing=False, attention="auto",
                 compile=False, load_image=open_rgb, matryoshka_dims=None):
        super().__init__()
        config = backbone.config.get_text_config()
        self.processor, self.load_image = processor, load_image
        self.tokenizer = tokenizer = getattr(processor, "tokenizer", processor)
        self.images = getattr(processor, "image_processor", None)
        self.chat, self.dim = self.images is not None, config.hidden_size
        # A vocabulary with a mask token belongs to a model that reads both ways.
        pooling = pooling or ("mean" if tokenizer.mask_token else "last")
        limit = getattr(config, "max_position_embeddings", None) or math.inf
        longest = min(tokenizer.model_max_length, limit, 8192)
        max_length = longest if max_length is None else max_length
        if not (pooling in POOLING and dtype in HALF and 1 <= max_length <= limit
                and (max_num_visual_tokens is None or max_num_visual_tokens >= 1)):
            raise ValueError(f"one of {pooling=}, {dtype=}, {max_length=} (the model's limit: "
                             f"{limit}), {max_num_visual_tokens=} is out of range")
        self.max_length, self.pooling, self.half = max_length, pooling, HALF[dtype]
        self.prompts = {"query": query_prompt or "", "document": document_prompt or ""}
        self.matryoshka_dims = matryoshka_dims
        if self.chat:           # instructions as Qwen3-VL-Embedding writes them: with a full stop
            self.prompts = {side: re.sub(r"(?<=\w)$", ".", p.strip()) or DEFAULT_INSTRUCTION
                            for side, p in self.prompts.items()}
            unit = (self.images.patch_size * self.images.merge_size) ** 2       # 1024 pixels
            budget = max_num_visual_tokens or self.images.size["longest_edge"] // unit
            self.images.size = dict(shortest_edge=unit * min(4, budget), longest_edge=unit * budget)
            self.frames = {}         # (instruction, has image) -> token ids; see frame()
        elif pooling == "last":
            append_end_token(tokenizer)
        backbone.config.use_cache = config.use_cache = False       # nothing is generated
        self.flash = attention == "auto" and self.half and backbone._supports_flash_attn
        if attention != "auto":
            backbone.set_attn_implementation(attention)
        self.attention = backbone.config._attn_implementation
        if lora_r and not isinstance(backbone, PeftModel):    # else a saved adapter trains on
            backbone = get_peft_model(backbone, LoraConfig(
                r=lora_r, lora_alpha=lora_alpha, lora_dropout=lora_dropout,
                target_modules=lora_layers(backbone, lora_targets, lora_vision)))
        self.lora = isinstance(backbone, PeftModel)
        if self.lora and lora_r not in (0, rank := backbone.peft_config["default"].r):
            raise ValueError(f"lora_r={lora_r}, but the model has an adapter of rank {rank}")
        for name, p in backbone.named_parameters():
            # BERT's pooler comes after the hidden states that we read: never any gradient.
            frozen = name.startswith("pooler.") or freeze_vision and "visual" in name.split(".")
            p.requires_grad_(not frozen and (p.requires_grad or not self.lora))
            stored = not p.requires_grad and self.half or torch.float32
            p.data = p.data.to(p.dtype if p.dtype == torch.float64 else stored)
        if gradient_checkpointing:
            # The re-entrant variant loses the gradient where a block's input needs none, as above
            # frozen embeddings. The random state is replayed within, so dropout is the same.
            backbone.activation_checkpointing_enable({"use_reentrant": False})
        self.backbone, self.compiled = backbone, bool(compile)
        # Block by block: all share compiled code, once with and once without a gradient, for one
        # sample or several. In place, so that names, saved files and copies are those of before.
        for layer in self.language_layers() if compile else ():
            layer.compile(backend="inductor" if compile is True else compile, dynamic=True,
                          recompile_limit=32)

    @classmethod
    def from_pretrained(cls, name_or_path, *, trust_remote_code=False, **options):
        """Folder or hub name -> BiEncoder; also what save_pretrained wrote. `options` are the
        constructor's; those left out or None come from the folder's sentence-transformers files.
        Raises OSError when there is no such model, ValueError for one that is not supported."""
        backbone, processor, options = read_folder(name_or_path, options, trust_remote_code)
        return cls(backbone, processor, **options)

    def frame(self, prompt, image):
        """The chat template around a text: token ids before it, the white space that must be
        tokenized together with it (Qwen merges line ends), token ids after it. Rendered once."""
        if (prompt, image) not in self.frames:
            before, after = self.processor.apply_chat_template([
                {"role": "system", "content": [{"type": "text", "text": prompt}]},
                {"role": "user", "content": [{"type": "image"}] * image
                                            + [{"type": "text", "text": MARK}]}],
                tokenize=False, add_generation_prompt=True).split(MARK)
            head = self.tokenizer(before.rstrip(), add_special_tokens=False).input_ids
            if head.count(self.processor.image_token_id) != image:
                raise ValueError(f"the instruction {prompt!r} contains an image token")
            space = before[len(before.rstrip()):]
            self.frames[prompt, image] = head, space, self.tokenizer(after).input_ids
        return self.frames[prompt, image]

    def preprocess(self, sample, side):
        """ONE sample -> dict of unpadded CPU tensors: "input_ids" (T,), and with an image
        "pixel_values" (P, F), "image_grid_thw" (1, 3). Touches no device: runs in loader workers.

        sample  text, or {"text", "image": path or PIL image, "prompt": instead of the side's}
        side    "query" or "document": whose prompt applies
        Raises ValueError for an image where the backbone reads text, or one that does not fit."""
        sample = sample if isinstance(sample, dict) else {"text": sample}
        text, image = sample.get("text") or "", sample.get("image") or None      # [] or "": none
        if side not in self.prompts or not isinstance(text, str) or image and not self.chat:
            raise ValueError(f"cannot encode {sample!r} as {side!r}: sides are query and document, "
                             f"a text is a string, and images need a vision model")
        prompt = sample.get("prompt") or self.prompts[side]
        if not self.chat:
            ids = self.tokenizer(prompt + text, truncation=True, max_length=self.max_length)
            return {"input_ids": torch.tensor(ids.input_ids or [0])}
        head, space, tail = self.frame(prompt, image is not None)
        features = {}
        if image is not None:
            image, resize = fit_image(self.load_image(image), self.images)
            features = dict(self.images(images=[image], do_resize=resize, return_tensors="pt"))
            tokens = len(features["pixel_values"]) // self.images.merge_size ** 2
            at = head.index(self.processor.image_token_id)
            head = head[:at] + head[at:at + 1] * tokens + head[at + 1:]
        elif not text:
            text = "NULL"                     # Qwen3-VL-Embedding's word for a sample with nothing
        room = self.max_length - len(head) - len(tail)
        if room < 0:
            raise ValueError(f"template and image need {self.max_length - room} tokens, max_length "
                             f"is {self.max_length}: raise it, or lower max_num_visual_tokens")
        # A text that spells "<|image_pad|>" must not become an image: its specials are plain words.
        body = self.tokenizer(space + text, add_special_tokens=False, split_special_tokens=True)
        return {"input_ids": torch.tensor(head + body.input_ids[:room] + tail), **features}

    def cost(self, features):
        """Work of one sample: its tokens plus its image patches, whether seen already or not."""
        patches = features["image_grid_thw"].prod() if "image_grid_thw" in features else 0
        return len(features["input_ids"]) + int(patches)

    def ready(self):
        """The device of the weights. With attention="auto" FlashAttention 2 is set for half
        precision on a GPU that has it, else the backbone's own (sdpa). Flash computes no padding:
        transformers takes it out by the mask before each call of the kernel, and puts it back."""
        device, backbone = next(self.parameters()).device, self.backbone
        flash = self.flash and device.type == "cuda" and is_flash_attn_2_available()
        name = "flash_attention_2" if flash else self.attention
        if name != backbone.config._attn_implementation:
            backbone.set_attn_implementation(name)
        return device

    def base(self):
        """The backbone without its adapters' wrapper."""
        return self.backbone.get_base_model() if self.lora else self.backbone

    @torch.no_grad()
    def see(self, samples, chunk_size, limit_bytes=2**30):
        """Features with pixels -> with "image_features" (1 + L, V, D) instead: what the language
        model gets of V visual tokens, at its input and its first L layers. Before a cached step,
        this spares a frozen vision tower the second visit; if it trains, nothing changes.

        `chunk_size` images at once. Those beyond `limit_bytes`, on the model's device, keep their
        pixels. Not for sharded weights, which only a whole forward puts together."""
        samples, device = list(samples), self.ready()
        images = [i for i, f in enumerate(samples) if "pixel_values" in f]
        if not images or any(p.requires_grad for p in self.base().visual.parameters()):
            return samples
        for start in range(0, len(images), chunk_size):
            chunk = images[start:start + chunk_size]
            with torch.autocast(device.type, self.half, enabled=self.half is not None):
                seen = self.base().get_image_features(*(torch.cat([samples[i][key].to(
                    device, non_blocking=True) for i in chunk]) for key in PIXELS))
            for i, *layers in zip(chunk, seen.pooler_output, *seen.get("deepstack_features", ())):
                layers = torch.stack(layers)                                        # (1 + L, V, D)
                if (limit_bytes := limit_bytes - layers.nbytes) < 0:
                    return samples
                samples[i] = {**samples[i], "image_features": layers}
                del samples[i]["pixel_values"]
        return samples

    def forward(self, features, truncate_dim=None):
        """List of C features -> (C, D) unit vectors, float32 (float64 if the weights are).

        The features are only read; padding that an "attention_mask" tells is taken off first."""
        clear_rope_deltas(self)
        device = self.ready()
        images = [f for f in features if "image_grid_thw" in f]
        rows = [f["input_ids"][f.get("attention_mask", f["input_ids"] >= 0) > 0] for f in features]
        width = max(map(len, rows))
        if self.compiled:                   # few different lengths, at most a quarter more padding
            step = max(16, 2 ** (width - 1).bit_length() // 8)
            width = max(width, min(-(-width // step) * step, self.max_length))
        batch = {name: torch.full((len(rows), width), filler) for name, filler in (
            ("input_ids", self.tokenizer.pad_token_id or 0), ("attention_mask", 0))}       # (C, T)
        for i, row in enumerate(rows):
            batch["input_ids"][i, :len(row)], batch["attention_mask"][i, :len(row)] = row, 1
        if images:              # marks the image tokens, on the padded ids, so it cannot be shifted
            batch["mm_token_type_ids"] = batch["input_ids"].eq(self.processor.image_token_id).long()
            # Rows and columns as positions, worked out here, where looking at numbers waits for no
            # GPU; the model would do the same after they were moved.
            batch["position_ids"], _ = self.base().get_rope_index(
                batch["input_ids"], batch["mm_token_type_ids"],
                torch.cat([f["image_grid_thw"] for f in images]),
                attention_mask=batch["attention_mask"])                             # (3, C, T)
        batch = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
        seen = any("image_features" in f for f in images)
        for key in images and PIXELS[seen:]:
            batch[key] = torch.cat([f[key].to(device, non_blocking=True) for f in images])
        if seen:                    # a public argument of the model; those not seen yet are now
            images = self.see(images, len(images), math.inf)
            layers = [f["image_features"].to(device) for f in images]           # each (1 + L, V, D)
            batch["mm_encoder_outputs"] = {"image": BaseModelOutputWithDeepstackFeatures(
                pooler_output=[own[0] for own in layers],
                deepstack_features=list(zip(*[own[1:] for own in layers])))}
        with torch.autocast(device.type, self.half, enabled=self.half is not None):
            hidden = self.backbone(**batch).last_hidden_state                           # (C, T, D)
        vectors = pool(hidden, batch["attention_mask"], self.pooling)
        return nn.functional.normalize(vectors[..., :truncate_dim], dim=-1)

    def encode(self, samples, side="document", batch_size=32, truncate_dim=None, progress=True,
               encoder=None):
        """List of n samples -> (n, D) on the CPU, in their order; pooling "tokens": (n, T, D). Eval
        mode, no gradient. Batches hold similar lengths. `encoder`: what frozen_start returned."""
        if isinstance(samples, (str, dict)):
            raise TypeError(f"encode takes a list of samples, not one: [{samples!r}]")
        order = sorted(range(len(samples)), key=lambda i: -len(str(samples[i])))
        vectors = [torch.empty(0, truncate_dim or self.dim)]              # none yet
        with evaluating(self):
            for start in tqdm(range(0, len(order), batch_size), f"encoding {side}", leave=False,
                              disable=None if progress else True):     # None: silent in a log file
                chosen = order[start:start + batch_size]
                features = [self.preprocess(samples[i], side) for i in chosen]
                vectors += (encoder or self)(features, truncate_dim).cpu().float()
        place = torch.tensor(order, dtype=torch.long).argsort()
        return nn.utils.rnn.pad_sequence(vectors[1:], True)[place] if order else vectors[0]

    def frozen_start(self, cache=None):
        """The starting model, as an encoder: list of features -> (C, D), eval mode, no gradient.

        With LoRA it is this very module with its adapter switched off, at no memory; otherwise a
        copy made now, so call it before training (and before loading a checkpoint). It computes
        only what its `cache`, a batches.VectorCache, does not know. (Not for sharded weights, which
        need equally many forwards everywhere, nor for features that went through `see`.)"""
        shared = {id(part): part for part in (self.processor, self.tokenizer, self.images)}
        source = self if self.lora else copy.deepcopy(self, shared).requires_grad_(False)

        def encode(features, truncate_dim=None):
            off = self.backbone.disable_adapter() if self.lora else contextlib.nullcontext()
            with evaluating(source), off:
                return source(features, truncate_dim)
        # A module without parameters: gradcache sees that it learns nothing, so that it keeps the
        # graphs of others, and nobody who trains or saves weights meets the source's twice.
        frozen = nn.Module()
        frozen.forward = cache.around(encode, source.backbone, self.pooling, str(
            self.half)) if cache else encode
        return frozen

    def language_layers(self):
        """The blocks that every sample runs through, to shard or compile; [] if in no list."""
        number = self.backbone.config.get_text_config().num_hidden_layers
        return next((list(part) for name, part in self.backbone.named_modules() if isinstance(
            part, nn.ModuleList) and len(part) == number and "visual" not in name), [])

    def save_pretrained(self, directory, merge_lora=False, card=None, place=None):
        """The folder of export.py, which says what these mean and which programs load it."""
        write_folder(self, directory, merge_lora, card, place)


CHAT_TEMPLATE = (       # Qwen3-VL's, for messages made of texts and images
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def tiny_qwen3_vl(texts=None, *, vocab_size=4096, hidden=128, layers=2, heads=4, seed=0):
    """-> (Qwen3VLModel of about 1.3 million random weights, its Qwen3VLProcessor). No network.

    The tokenizer is Qwen's byte-level BPE, its merges learned from `texts` (None: bytes only). The
    same arguments give the same weights; the global random state is left as found."""
    special = [f"<|{name}|>" for name in ("endoftext", "im_start", "im_end", "image_pad",
                                          "video_pad", "vision_start", "vision_end")]
    tokenizer = Qwen2Tokenizer(eos_token="<|im_end|>", extra_special_tokens=special)
    tokenizer = tokenizer.train_new_from_iterator(texts or [], vocab_size, show_progress=False)
    image, video, start, end = tokenizer.convert_tokens_to_ids(special[3:])
    look = dict(patch_size=16, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    processor = Qwen3VLProcessor(Qwen2VLImageProcessor(**look), tokenizer,
                                 Qwen3VLVideoProcessor(**look), chat_template=CHAT_TEMPLATE)
    config = Qwen3VLConfig(
        image_token_id=image, video_token_id=video, vision_start_token_id=start,
        vision_end_token_id=end, vision_config=dict(
            depth=2, hidden_size=64, intermediate_size=128, num_heads=4, out_hidden_size=hidden,
            num_position_embeddings=64, deepstack_visual_indexes=[0]), text_config=dict(
            vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden,
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 2,
            head_dim=hidden // heads, max_position_embeddings=8192,
            rope_parameters=dict(rope_type="default", rope_theta=1e4)))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)         # torch.manual_seed would reseed GPUs
        model = Qwen3VLModel(config)
        # At the library's 0.02 attention adds next to nothing to the pooled token, whose own
        # embedding is the same for all texts. With these the content arrives from the first step.
        for name, p in model.language_model.named_parameters():
            if name.endswith(("v_proj.weight", "o_proj.weight")):
                nn.init.normal_(p, std=2 * p.shape[1] ** -0.5)
    return model, processor
