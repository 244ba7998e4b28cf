import json
import math

from jaxtrain.telemetry.metrics import MetricsWriter
from jaxtrain.telemetry.norms import as_json, layer_by_layer, read_norms, update_ratios

NORMS = {
    "gradient_norm": {"embed.table": 0.5, "layers.mlp.up": [1.0, math.inf]},
    "parameter_norm": {"embed.table": 0.0, "layers.mlp.up": [4.0, 2.0]},
    "update_norm": {"embed.table": 0.25, "layers.mlp.up": [1.0, 3.0]},
}


def test_a_line_is_strict_json_and_comes_back(tmp_path):
    path = tmp_path / "norms.jsonl"
    with MetricsWriter(path, 0) as norms:
        norms.write(step=4, **as_json(NORMS))

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(path.read_text(), parse_constant=refuse)["gradient_norm"]["layers.mlp.up"] == [1.0, None]
    (line,) = read_norms(path)
    assert math.isnan(line["gradient_norm"]["layers.mlp.up"].pop())
    assert line == {
        "step": 4,
        "gradient_norm": {"embed.table": 0.5, "layers.mlp.up": [1.0]},
        "parameter_norm": {"embed.table": 0.0, "layers.mlp.up": [4.0, 2.0]},
        "update_norm": {"embed.table": 0.25, "layers.mlp.up": [1.0, 3.0]},
    }


def test_a_layer_is_named_by_its_number():
    assert dict(layer_by_layer(NORMS["parameter_norm"])) == {
        "embed.table": 0.0,
        "layers.mlp.up/0": 4.0,
        "layers.mlp.up/1": 2.0,
    }


def test_a_ratio_is_to_the_parameters_own_norm_and_none_to_zero():
    ratios = update_ratios(NORMS)
    assert math.isnan(ratios.pop("embed.table"))
    assert ratios == {"layers.mlp.up/0": 0.25, "layers.mlp.up/1": 1.5}
