"""Which formats the weights of draft layers are stored in. Needs no Paddle."""

from __future__ import annotations

from dataclasses import replace

from fastdeploy_sd.config import Config
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.ops.linear_format import LinearFormat

# Every pass of a draft layer reads a whole head, most of its bytes. Four bits halve or quarter them and lose half a
# percent of the accepted drafts at most (bench speculation, demo model).
_AUTO_HEAD: LinearFormat = "wint4"
# The rest is most of what is left then. Eight bits lose one accepted draft in some thousand.
_AUTO_LINEAR: LinearFormat = "wint8"


def own_scheme(config: Config) -> QuantScheme:
    """Return what `speculative_config.quantization` says of the draft layers' weights, whatever they read a head as."""
    asked, dtype = config.speculative.quantization, config.model.dtype
    if asked is not None:
        return QuantScheme.create(dtype, None if asked == "none" else asked)
    scheme = QuantScheme.create(dtype, config.model.quantization)
    linear, experts = (_AUTO_LINEAR if fmt == dtype else fmt for fmt in (scheme.linear, scheme.experts))
    return replace(scheme, linear=linear, experts=experts)


def draft_scheme(config: Config) -> QuantScheme:
    """Return how the draft layers' own weights are stored."""
    scheme = own_scheme(config)
    return replace(scheme, lm_head=draft_head_format(config, scheme.lm_head))


def draft_head_format(config: Config, own: LinearFormat) -> LinearFormat:
    """Return what draft layers read a head as that is otherwise stored as `own`."""
    asked = config.speculative.draft_head_quantization
    if asked == "target":
        return own
    return _AUTO_HEAD if asked == "auto" else asked
