"""python -m jaxtrain.drilling.supervised local …: the launcher, with processes that have faults in them.

It ends with the drill that has started it, however that ends.
"""

import sys

from jaxtrain.command import leave
from jaxtrain.launch import main
from jaxtrain.launchers.worker import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    leave(main(sys.argv[1:], module="jaxtrain.drilling.process"))
