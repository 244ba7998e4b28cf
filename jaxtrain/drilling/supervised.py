"""python -m jaxtrain.drilling.supervised local …: the launcher, with processes that have faults in them."""

import sys

from jaxtrain.command import leave
from jaxtrain.launch import main

if __name__ == "__main__":
    leave(main(sys.argv[1:], module="jaxtrain.drilling.process"))
