"""What the shipped configurations hold; two tests count them in different ways."""

PARAMETERS = {
    "quickstart": 9_112_320,
    "digits-vit": 199_104,
    "gpt2-124m": 123_587_328,
    "smollm2-135m": 134_515_008,
    "mistral-7b": 7_241_732_096,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}
