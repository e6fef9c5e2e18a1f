# ddp_loop in an image: on the CPU, or on a base that has CUDA and torch.
#
#   docker build -t ddp_loop .
#   docker build -t ddp_loop:cuda --build-arg BASE=pytorch/pytorch:TAG .        # TAG with torch 2.11 or newer
#   docker run --rm --shm-size=1g ddp_loop ddp_loop run --ranks 2 examples/digits/train.py --epochs 1
#   docker build --target tested .                                             # runs the quick tests of the package
#
# Ranks exchange sums in /dev/shm: Docker's 64 MB are little, so pass --shm-size (or --ipc=host).

ARG BASE=python:3.12-slim
FROM ${BASE} AS installed
WORKDIR /ddp_loop
COPY . .
RUN python3 -m pip install --no-cache-dir ".[digits,handwritten,metrics,monitor,sweep,terminal]"
CMD ["ddp_loop", "devices"]

FROM installed AS tested
RUN apt-get update -qq && apt-get install -qq --no-install-recommends git make
RUN make test JOBS=2

FROM installed
