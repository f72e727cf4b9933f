"""The tables of a job: `[train]`, `[output]` and `[checkpoint]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, ValidationInfo, field_validator, model_validator

from infinity.config.schema import MAY_CHANGE, SEED, Section, one_or_more
from infinity.config.values import (
    Flag,
    Location,
    auto_or,
    choice,
    conflict,
    file_name,
    integer,
    number,
    or_off,
    refuse,
    size,
    some_text,
)
from infinity.sizes import GIB, counted

Nonfinite = Literal["error", "skip"]
LrSchedule = Literal["constant", "linear", "cosine"]
Durability = Literal["none", "checkpoint", "step"]
Method = Literal[
    "sft", "dpo", "reward", "classify", "embed", "distill", "grpo", "rloo", "diffusion"
]  # fmt: skip
Purpose = Literal["generates text", "scores sequences", "embeds text"]
EmbedLoss = Literal[
    "MultipleNegativesRankingLoss", "MultipleNegativesSymmetricRankingLoss",
    "CachedMultipleNegativesRankingLoss", "CachedMultipleNegativesSymmetricRankingLoss",
    "TripletLoss", "CoSENTLoss", "AnglELoss", "CosineSimilarityLoss", "ContrastiveLoss",
    "OnlineContrastiveLoss",
]  # fmt: skip
Aspect = Literal["square", "keep"]
Weighting = Literal["none", "sigma_sqrt", "logit_normal", "mode", "cosmap"]
Tracker = Literal["trackio", "tensorboard", "wandb"]
_Tracker = Annotated[Tracker, choice(Tracker)]


class MethodFacts(NamedTuple):
    """The traits of a method of training."""

    trainer: str = "SFTTrainer"  # "Trainer" is that of transformers.
    key: str = ""  # Of [train]: what this method needs, and methods without it refuse.
    records: str = ""  # In words, where it learns no text files.
    purpose: Purpose = "generates text"  # Of the model.
    has_reference: bool = False  # The loss may compare with the model before training.
    num_sequences: int = 1  # Of a record.


METHODS: dict[Method, MethodFacts] = {
    "sft": MethodFacts(),
    "dpo": MethodFacts(
        "DPOTrainer", "", "chosen and rejected", has_reference=True, num_sequences=2
    ),
    "reward": MethodFacts(
        "RewardTrainer", "", "chosen and rejected", "scores sequences", num_sequences=2
    ),
    "classify": MethodFacts("Trainer", "labels", "text and label", "scores sequences"),
    "embed": MethodFacts(
        "SentenceTransformerTrainer", "embed", "anchor and positive", "embeds text",
        num_sequences=2,
    ),
    "distill": MethodFacts(key="distill"),
    "grpo": MethodFacts("GRPOTrainer", "grpo", "a prompt", has_reference=True),
    "rloo": MethodFacts("RLOOTrainer", "grpo", "a prompt", has_reference=True),
    "diffusion": MethodFacts("Trainer", "diffusion"),
}  # fmt: skip


class Sample(Section):
    """A text that the trained model writes at the end."""

    prompt: Annotated[str, some_text("the text to continue")]
    """How it begins."""
    new_tokens: Annotated[int, integer(1)] = 200
    """Tokens to generate."""
    temperature: Annotated[float, number(minimum=0)] = 0.8
    """Randomness of the choice; 0 always takes the likeliest token."""
    top_k: Annotated[int | None, or_off(integer(1))] = None
    """Choose among this many likeliest tokens."""


class Distill(Section):
    """The teacher of "distill", and the divergence of the student from it."""

    teacher: Annotated[Location, MAY_CHANGE]
    """The directory of a model with the student's tokenizer, which is frozen, or a file that
    `infinity score --top-k` wrote of the same data."""
    forward_kl: Annotated[float, number(minimum=0)] = 1.0
    """Weight of KL(teacher || student): the student covers the teacher."""
    reverse_kl: Annotated[float, number(minimum=0)] = Field(0.0, validate_default=True)
    """Weight of KL(student || teacher): the student keeps to what is likely."""
    temperature: Annotated[float, number(above=0)] = 1.0
    """Divides the logits of both. Other than 1 with a directory only."""
    top_k: Annotated[int, integer(1)] = 64
    """Likeliest tokens of a teacher's directory at each place; all others are one more outcome. A
    file has its own number."""

    @field_validator("reverse_kl")
    @classmethod
    def _learns_something(cls, reverse_kl: float, info: ValidationInfo) -> float:
        if reverse_kl == 0 and info.data.get("forward_kl") == 0:
            raise refuse("more than 0, because forward_kl is 0", reverse_kl)
        return reverse_kl


class Grpo(Section):
    """The answers that "grpo" and "rloo" generate, and their rewards."""

    rewards: tuple[Annotated[str, some_text('"module:function"')], ...] = ()
    """Functions "module:function", which TRL calls with prompts, completions and further columns of
    the records. Their sum is the reward."""
    reward_model: Annotated[Location | None, MAY_CHANGE] = None
    """The directory of a model that scores sequences, or of an adapter that does so over the base
    of [adapter], beside the functions or alone."""
    num_generations: Annotated[int, integer(2)] = 8
    """Completions of a prompt, which are compared with each other. Divides the sequences of a
    step."""
    max_completion_length: Annotated[int, integer(1)] = 256
    """Tokens of a completion at most. With those of the prompt at most data.sequence_length."""
    temperature: Annotated[float, number(above=0)] = 1.0
    """Randomness of what is generated."""
    beta: Annotated[float, number(minimum=0)] = 0.0
    """Strength with which the model is held to that before training."""
    sampler: Annotated[str, some_text("a sampler"), MAY_CHANGE] = "transformers"
    """ "transformers" generates with the model that is trained. The address of an OpenAI-compatible
    server, "http://HOST:PORT", makes that server generate; "grpo" with [adapter] only."""
    sampler_directory: Annotated[Location | None, MAY_CHANGE] = Field(
        None, json_schema_extra={"x-default": "`sampler` inside output.directory"}
    )
    """The directory in which a server reads the adapter."""

    @property
    def is_served(self) -> bool:
        """Whether a server generates."""
        return self.sampler.startswith(("http://", "https://"))

    @model_validator(mode="after")
    def _can_be(self) -> Grpo:
        if not self.rewards and self.reward_model is None:
            raise conflict("expected rewards, reward_model or both; got neither")
        if not self.is_served and self.sampler != "transformers":
            came = f"got {self.sampler!r}"
            raise conflict(f'sampler: expected "transformers" or http://HOST:PORT; {came}')
        return self


class Diffusion(Section):
    """The inputs that "diffusion" gives the transformer of a pipeline of diffusers."""

    resolution: Annotated[int, integer(8)]
    """Pixels of a side of the images, which are resized and cut to squares."""
    aspect: Annotated[Aspect, choice(Aspect)] = "square"
    """ "keep" gives each image its own sides, of about that area. A micro-batch is one image."""
    frames: Annotated[int, integer(1)] = 1
    """Of each video, from its beginning: one more than a multiple of 4, for Wan. 1: images."""
    fps: Annotated[float, number(above=0)] = 16.0
    """Frames a second to which videos are brought. Wan generates 16."""
    weighting: Annotated[Weighting, choice(Weighting)] = "none"
    """Which noise levels are drawn ("logit_normal", "mode"; others uniformly) and how the loss of
    each counts ("sigma_sqrt", "cosmap"; others alike): `weighting_scheme` of the scripts of
    diffusers."""
    logit_mean: Annotated[float, number()] = 0.0
    """The mean of "logit_normal"."""
    logit_std: Annotated[float, number(above=0)] = 1.0
    """The standard deviation of "logit_normal"."""
    mode_scale: Annotated[float, number(minimum=-1, maximum=1.75)] = 1.29
    """The scale of "mode". Beyond these bounds noise levels would not grow with what is drawn."""
    guidance: Annotated[float, number(minimum=0)] = 3.5
    """The guidance that a guidance-distilled transformer, such as FLUX.1-dev, is given."""
    cache: Annotated[Location | None, MAY_CHANGE] = Field(
        None, json_schema_extra={"x-default": "`encoded` inside output.directory"}
    )
    """Directory of latents and prompt embeddings, which runs may share."""

    def described(self, count: int) -> str:
        """Returns a number of images or videos of a run in words."""
        what = "images" if self.frames == 1 else f"videos of {self.frames} frames"
        size = f"{self.resolution} x {self.resolution} pixels"
        return f"{counted(count, what)} of {'about ' if self.aspect == 'keep' else ''}{size}"


class Embed(Section):
    """The loss of "embed"."""

    loss: Annotated[EmbedLoss, choice(EmbedLoss)]
    """A class of sentence-transformers."""
    options: dict[str, int | float] = Field(default_factory=dict)
    """Its numbers, such as `scale` or `mini_batch_size`."""
    prompts: dict[str, str] = Field(default_factory=dict)
    """The text before each text of a column."""


class Train(Section):
    """The main job: `infinity train`. A trainer of TRL makes the steps."""

    method: Annotated[Method, choice(Method)] = "sft"
    """ "sft" learns texts, answers and completions; "dpo" learns to prefer `chosen` to `rejected`;
    "reward" trains a head that scores `chosen` above `rejected`; "classify" one that tells the
    `label` of a `text`; "embed" learns embeddings ([train.embed]); "distill" learns the teacher of
    [train.distill]; "grpo" and "rloo" learn from rewards ([train.grpo]); "diffusion" learns images
    or videos with captions ([train.diffusion])."""
    labels: tuple[Annotated[str, some_text("the name of a label")], ...] = ()
    """The names that "classify" tells apart, in the order of their numbers. A record has either."""
    steps: Annotated[int | None, or_off(integer(1))] = None
    """Optimizer steps. Exactly one of steps and epochs is required."""
    epochs: Annotated[float | None, or_off(number(above=0))] = None
    """Passes over the training data; a part of one such as 0.5 is allowed."""
    batch_size: Annotated[int, integer(1)]
    """Sequences in one forward. A step sees batch_size * gradient_accumulation_steps of them."""
    gradient_accumulation_steps: Annotated[int, integer(1)] = 1
    """Backward passes whose gradients make one step."""
    schedule: Annotated[LrSchedule, choice(LrSchedule)] = "constant"
    """Course of the learning rate after the warm-up, as transformers' `get_scheduler` computes it.
    """
    warmup_steps: Annotated[int, integer(0)] = 0
    """Steps over which the learning rate rises; the first of them has rate 0. At most `steps`."""
    min_lr_ratio: Annotated[float, number(minimum=0, maximum=1)] = 0.0
    """Learning rate at the end of linear and cosine, relative to the peak."""
    eval_every: Annotated[int, integer(0), MAY_CHANGE] = 0
    """Evaluate on held-out data every so many steps; 0 is never."""
    eval_batches: Annotated[int, integer(1), MAY_CHANGE] = 8
    """Batches per evaluation."""
    early_stopping_patience: Annotated[int, integer(0), MAY_CHANGE] = 0
    """End after so many evaluations in a row without a new lowest loss; 0 is never."""
    keep_best: Annotated[Flag, MAY_CHANGE] = False
    """Write the weights of each new lowest evaluation loss to `best` in output.directory."""
    report_to: Annotated[
        tuple[_Tracker, ...],
        one_or_more(_Tracker),
        MAY_CHANGE,
    ] = ()
    """Trackers that get each log line and evaluation. Each needs its package."""
    run_name: Annotated[str | None, or_off(some_text("the name of the run")), MAY_CHANGE] = None
    """The name of the run in trackers. Default: that of the output directory."""
    dpo_beta: Annotated[float, number(above=0)] = 0.1
    """Strength with which "dpo" holds to the model before training."""
    embed: Embed | None = None
    """The loss of "embed"."""
    distill: Distill | None = None
    """The teacher of "distill"."""
    grpo: Grpo | None = None
    """Generation and rewards of "grpo" and "rloo"."""
    diffusion: Diffusion | None = None
    """Images and noise of "diffusion"."""
    activation_checkpointing: Annotated[Flag, MAY_CHANGE] = False
    """Recompute activations in the backward."""
    mlp_tokens: Annotated[int, integer(1), MAY_CHANGE] | None = None
    """For long sequences: an MLP computes so many tokens at a time. Its backward holds the values
    of these alone, and repeats its forward. Results agree to rounding. Routed experts stay as they
    are."""
    nonfinite: Annotated[Nonfinite, choice(Nonfinite), MAY_CHANGE] = "error"
    """What to do about a step whose loss or norm is not finite: "error" ends the run with the
    weights of the step before; "skip" leaves the weights as they are and continues. More than 16
    such steps in a row are an error."""
    seed: Annotated[int, SEED] = 0
    """Seed of dropout and other randomness."""
    log_every: Annotated[int, integer(1), MAY_CHANGE] = 1
    """Steps between log lines."""
    threads: Annotated[Literal["auto"] | int, auto_or(integer(1, 4096)), MAY_CHANGE] = "auto"
    """CPU threads that compute."""
    sample: Annotated[Sample | None, MAY_CHANGE] = None
    """Generate a sample at the end."""

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        if (self.steps is None) == (self.epochs is None):
            came = "neither" if self.steps is None else "both"
            raise conflict(f"expected exactly one of steps and epochs; got {came}")
        return self

    @field_validator("min_lr_ratio")
    @classmethod
    def _falls(cls, ratio: float, info: ValidationInfo) -> float:
        if ratio and info.data.get("schedule") == "constant":
            raise refuse('0 with train.schedule = "constant", whose rate does not fall', ratio)
        return ratio

    @property
    def facts(self) -> MethodFacts:
        """The traits of the method."""
        return METHODS[self.method]

    @model_validator(mode="after")
    def _of_method(self) -> Train:
        for key in dict.fromkeys(facts.key for facts in METHODS.values() if facts.key):
            if (self.facts.key == key) != bool(getattr(self, key)):
                names = " or ".join(f'"{m}"' for m, facts in METHODS.items() if facts.key == key)
                what = key if key == "labels" else f"[train.{key}]"
                raise conflict(f"expected {what} with method = {names}, and with no other")
        writes = self.facts.purpose == "generates text" and self.diffusion is None
        if self.sample is not None and not writes:
            raise conflict(
                f'sample: expected none with method = "{self.method}", which writes no text'
            )
        if self.labels and len(set(self.labels)) < max(2, len(self.labels)):
            raise conflict(
                f"labels: expected at least two, each once; got {', '.join(self.labels)}"
            )
        return self

    @model_validator(mode="after")
    def _rewarded(self) -> Train:
        if self.grpo is not None and self.eval_every:
            came = f'with "{self.method}", whose rewards are in the metrics; got {self.eval_every}'
            raise conflict(f"eval_every: expected 0 {came}")
        if self.grpo is not None and self.grpo.is_served and self.method == "rloo":
            raise conflict('grpo.sampler: expected "transformers" with method = "rloo"')
        return self

    @field_validator("warmup_steps")
    @classmethod
    def _warmup_ends(cls, warmup_steps: int, info: ValidationInfo) -> int:
        steps = info.data.get("steps")
        if steps is not None and warmup_steps > steps:
            raise refuse(f"at most train.steps, {steps}", warmup_steps)
        return warmup_steps


# Names, or patterns of names, in output.directory that runs, PEFT and transformers write there.
_OWN_NAMES = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.model", "*.jinja", "*.partial",
    "*.py", "*.damaged-*", ".infinity*", "infinity*", "*config.json", "tokenizer*", "vocab*",
    "merges.txt", "*tokens*.json", "*chat_template*", "readme.md", "summary.json", "best",
    "checkpoints", "encoded", "shards.json", "modules.json", "config_sentence*", "[0-9]_*",
)  # fmt: skip


class Output(Section):
    """The files that a run writes."""

    directory: Location = Field("output", validate_default=True)
    """Directory of everything a run writes."""
    metrics: Annotated[str, file_name(_OWN_NAMES)] = "metrics.jsonl"
    """The file in `directory` that gets one JSON object per step."""
    max_shard_size: Annotated[int, size()] = 2 * GIB
    """Largest safetensors file of the export."""
    export: Flag = True
    """Write a Hugging Face checkpoint at the end."""
    notify: Annotated[str, some_text("a command for the shell")] | None = None
    """It gets one JSON object on its input at the end, at a failure, and when the
    held-out loss is on a plateau (five evaluations without a new lowest): `event` says which,
    `text` is for people. A webhook: `"curl -sd @- https://..."`."""

    @property
    def metrics_path(self) -> Path:
        """The file of metrics, in `output.directory`."""
        return self.directory / self.metrics


class Checkpoint(Section):
    """Copies of the whole state of a run, from which `infinity train --resume` continues exactly.

    Written only if the file has this section; the last one at the end of the steps, or when SIGTERM
    or Ctrl-C stops them.
    """

    every: Annotated[int, integer(0)] = 0
    """Steps between checkpoints; 0 writes none in between."""
    keep: Annotated[int, integer(1)] = 2
    """Newest checkpoints that are kept. One more fits the drive for a moment."""
    durability: Annotated[Durability, choice(Durability)] = "checkpoint"
    """ "checkpoint" keeps `keep` spare generations of what training rewrites on NVMe, so a
    checkpoint on the same file system is links; one on another is copied while training continues.
    "step" also commits every step, for one more generation and a flush per step. "none" takes no
    spare space: checkpoints are copies, and training waits."""
    grace_s: Annotated[int, integer(0)] = 0
    """Seconds that a background copy may still take after SIGTERM or Ctrl-C. Then it is cancelled,
    and `--resume` continues from the swap directory. 0 waits until it is done."""
    directory: Location | None = Field(
        None, json_schema_extra={"x-default": "`checkpoints` inside output.directory"}
    )
    """Directory of the checkpoints of this run and no other."""
