import pytest

from jaxtrain.telemetry import jsonl


def test_a_nan_inside_a_list_is_refused_rather_than_written_as_no_json():
    with pytest.raises(ValueError, match="not JSON compliant"):
        jsonl.encode({"losses": [1.0, float("nan")]})
