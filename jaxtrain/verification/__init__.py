"""The certificate of equality: a config made small, trained on one device and on its kind of mesh, and compared."""

from jaxtrain.verification.certificate import Certificate, Check
from jaxtrain.verification.shrink import device_count
from jaxtrain.verification.trial import verify
