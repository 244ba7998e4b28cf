"""What one update is: its direction (optax, told by role what a parameter is), its learning rate, and the average."""

from jaxtrain.optimizer.ema import Weights, updated_average, weights
from jaxtrain.optimizer.frozen import complete, freeze, like, trainable
from jaxtrain.optimizer.schedule import learning_rate, schedule_inputs
from jaxtrain.optimizer.state import state_axes
from jaxtrain.optimizer.update import make_optimizer
