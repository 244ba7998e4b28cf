"""The certificate of equality: a config made small, trained on one device and on its kind of mesh, and compared."""

from jaxtrain.verification.certificate import Certificate, Check
from jaxtrain.verification.shrink import device_count, small_mesh
from jaxtrain.verification.trial import verify

__all__ = ["Certificate", "Check", "device_count", "small_mesh", "verify"]
