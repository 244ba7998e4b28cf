"""Going on with text: prompts as tokens, the decoding loop on the devices, and text again."""

from jaxtrain.generation.generator import Generator
from jaxtrain.generation.prompts import encode_prompts, read_prompts, room_for_tokens
from jaxtrain.generation.sampling import Sampling
