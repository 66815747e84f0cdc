"""generate() for the hub: Saguaro with `assistant_model` as the draft."""

from saguaro_runtime import EngineConfig
from saguaro_runtime.integrations.transformers import Saguaro

_last = None


def generate(model, assistant_model=None, streamer=None, seed=None, saguaro_config=None, **kwargs):
    """model.generate(**kwargs), decoded with `assistant_model` drafting ahead.

    Args:
        assistant_model: the draft; shares the target's token ids.
        streamer, seed: see saguaro_runtime.integrations.transformers.Saguaro.
        saguaro_config: a saguaro_runtime.EngineConfig. Default: EngineConfig().
    """
    global _last
    if assistant_model is None:
        raise ValueError("custom_generate: got no assistant_model, want the draft")
    tokenizer, strings = kwargs.pop("tokenizer", None), kwargs.pop("stop_strings", None)
    options = {
        "config": saguaro_config or EngineConfig(),
        "streamer": streamer,
        "seed": seed,
        "tokenizer": tokenizer,
        "stop_strings": strings or (),
    }
    hook = Saguaro(assistant_model, **options)
    if _last is not None:
        hook.take_over(_last)
    _last = hook
    return model.generate(**kwargs, custom_generate=hook)
