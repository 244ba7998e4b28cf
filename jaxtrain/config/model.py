"""The keys of `model`: which network, of which sizes."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from jaxtrain.config.base import CodeName, Count, OpenSection, Section, choose_by_default, section, setting


class RopeScaling(Section):
    """Llama 3's stretching of rotary frequencies to sequences longer than those of pre-training."""

    factor: float = setting(..., "Factor by which low frequencies are slowed down.", ge=1)
    low_frequency_factor: float = setting(
        ..., "Frequencies with fewer turns than this within original_sequence are slowed down fully.", gt=0
    )
    high_frequency_factor: float = setting(
        ..., "Frequencies with more turns than this within original_sequence stay as they are.", gt=0
    )
    original_sequence: Count = setting(..., "Sequence length of pre-training, in tokens.", gt=0)


class RopeConfig(Section):
    """Rotary position embedding."""

    theta: float = setting(10000.0, "Base of the rotary wave lengths.", gt=0)
    scaling: RopeScaling | None = setting(None, "Llama 3's frequency scaling; null: none.")


class LossConfig(Section):
    """What is added to the cross-entropy, and in what pieces it is computed."""

    z: float = setting(0.0, "Weight of the squared log-partition (z-loss); 0: none.", ge=0)
    label_smoothing: float = setting(0.0, "Share of the target spread evenly over the vocabulary.", ge=0, lt=1)
    chunk: Count = setting(2048, "Tokens per device whose logits exist at the same time.", may_change=True, gt=0)


class DecoderConfig(Section):
    """A decoder-only transformer; the default sizes are small, like the quickstart's."""

    family: Literal["decoder"] = setting("decoder", "Model family.")
    vocab: Count = setting(8192, "Rows of the embedding: the largest token id plus one, or more.", gt=0)
    layers: Count = setting(4, "Transformer layers.", gt=0)
    embed: Count = setting(256, "Width of the residual stream.", gt=0)
    heads: Count = setting(8, "Query heads.", gt=0)
    kv_heads: Count | None = setting(None, "Key and value heads, a divisor of heads; null: as many as heads.", gt=0)
    head_dim: Count | None = setting(None, "Width of a head, even; null: embed / heads.", gt=0)
    mlp: Count = setting(1024, "Width of the gated feed-forward layer.", gt=0)
    activation: Literal["silu", "gelu"] = setting("silu", "Activation of the feed-forward gate: SwiGLU or GeGLU.")
    norm_epsilon: float = setting(1e-5, "Added to the mean square in RMSNorm.", gt=0)
    rope: RopeConfig = section(RopeConfig, "How attention is told positions.")
    qk_norm: bool = setting(False, "Normalise queries and keys in each head.")
    window: Count | None = setting(None, "Sliding-window attention: tokens seen, itself included; null: all.", gt=0)
    logit_softcap: float | None = setting(None, "Output logits are bent to within plus or minus this; null: not.", gt=0)
    bias: Literal["none", "qkv", "all"] = setting("none", "Projections that have a bias.")
    tied_embeddings: bool = setting(False, "Use the embedding as the output head too.")
    dropout: float = setting(0.0, "Share of activations dropped while training.", ge=0, lt=1)
    initial_scale: float = setting(0.02, "Standard deviation of initial weights.", gt=0)
    loss: LossConfig = section(LossConfig, "The training loss.")

    @property
    def resolved_kv_heads(self) -> int:
        """Key and value heads with null replaced by `heads`."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def resolved_head_dim(self) -> int:
        """Width of a head with null replaced by `embed / heads`."""
        return self.embed // self.heads if self.head_dim is None else self.head_dim


class VitConfig(Section):
    """A vision transformer that classifies images (arXiv 2010.11929); the default sizes are for 8×8 digits."""

    family: Literal["vit"] = setting(..., "Model family.")
    image: Count = setting(8, "Height and width of an image, in pixels.", gt=0)
    channels: Count = setting(1, "Values of a pixel: 1 for grey, 3 for colour.", gt=0)
    patch: Count = setting(4, "Height and width of a patch, in pixels; a divisor of image.", gt=0)
    classes: Count = setting(10, "What an image can be.", gt=1)
    layers: Count = setting(4, "Transformer layers.", gt=0)
    embed: Count = setting(128, "Width of the residual stream.", gt=0)
    heads: Count = setting(4, "Attention heads, a divisor of embed.", gt=0)
    mlp: Count = setting(512, "Width of the feed-forward layer.", gt=0)
    norm_epsilon: float = setting(1e-5, "Added to the mean square in RMSNorm.", gt=0)
    dropout: float = setting(0.0, "Share of activations dropped while training.", ge=0, lt=1)
    shift: Count = setting(0, "While training, each image is moved by up to so many pixels; 0: not.", ge=0)
    initial_scale: float = setting(0.1, "Standard deviation of initial weights.", gt=0)

    @property
    def patches(self) -> int:
        """Patches of an image: the transformer's sequence length."""
        return (self.image // self.patch) ** 2


class OwnModelConfig(OpenSection):
    """Somebody's own task, made by the callable that `target` names."""

    family: Literal["target"] = setting("target", "Model family.")
    target: CodeName = setting(..., "MODULE:NAME of a callable that takes the other keys and returns a task.")


ModelConfig = Annotated[
    DecoderConfig | VitConfig | OwnModelConfig,
    Field(discriminator="family"),
    BeforeValidator(choose_by_default("family", "decoder", or_target=True)),
]
