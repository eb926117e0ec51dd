"""The weight formats of draft layers. Needs no Paddle."""

from __future__ import annotations

from dataclasses import replace

from fastdeploy_sd.config import Config
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.ops.linear_format import LinearFormat

# A pass of a draft layer reads the whole head, most of its bytes. Four bits halve or quarter them, and lose at most
# half a percent of the accepted drafts (bench speculation, demo model).
_AUTO_HEAD: LinearFormat = "wint4"
# The linear layers are most of the other bytes. Eight bits lose about one accepted draft in a thousand.
_AUTO_LINEAR: LinearFormat = "wint8"


def own_scheme(config: Config) -> QuantScheme:
    """Return the scheme that `speculative_config.quantization` sets for draft layers, whatever their head's format."""
    asked, dtype = config.speculative.quantization, config.model.dtype
    if asked is not None:
        return QuantScheme.create(dtype, None if asked == "none" else asked)
    scheme = QuantScheme.create(dtype, config.model.quantization)
    linear, experts = (_AUTO_LINEAR if fmt == dtype else fmt for fmt in (scheme.linear, scheme.experts))
    return replace(scheme, linear=linear, experts=experts)


def draft_scheme(config: Config) -> QuantScheme:
    """Return the scheme of the draft layers' own weights."""
    scheme = own_scheme(config)
    return replace(scheme, lm_head=draft_head_format(config, scheme.lm_head))


def draft_head_format(config: Config, own: LinearFormat) -> LinearFormat:
    """Return the format in which draft layers read a head that is otherwise stored as `own`."""
    asked = config.speculative.draft_head_quantization
    if asked == "target":
        return own
    return _AUTO_HEAD if asked == "auto" else asked
