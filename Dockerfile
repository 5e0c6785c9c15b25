# Two images: the operator, and a trainer with PyTorch and the examples.
#
#   docker build --target operator -t ddpjob-operator:0.1.0 .
#   docker build --target trainer  -t ddpjob-trainer .
#
# By default PyTorch comes from PyPI, which has the wheel for one version of CUDA. TORCH_INDEX adds an index with wheels
# for CPUs (much smaller) or for your driver's CUDA:   --build-arg TORCH_INDEX=https://…/whl/cpu
#
# All other packages are installed by the hashes in pins/, written by `make pins` for x86_64 and aarch64. To accept one
# wheel of torch only, set its hash: --build-arg TORCH_SHA256=…. For a release, pin the base image, too:
#   --build-arg PYTHON_IMAGE=$(cat pins/python-image.txt)
# The default is a tag, because a builder without a registry finds its local image only by tag. To find a newer digest:
#   docker buildx imagetools inspect python:3.11-slim-bookworm
#
# Both images run as uid 65532 and write only to /tmp; the trainer also writes to its working directory. If the
# root is read-only, mount an emptyDir there.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm


# Build our wheel. The build tools stay in this stage.
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pins/build.txt ./
RUN pip install --no-cache-dir --no-deps --require-hashes -r build.txt
COPY LICENSE README.md pyproject.toml ./
COPY operator operator
COPY trainer trainer
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheel .


FROM ${PYTHON_IMAGE} AS operator-environment
RUN python -m venv --without-pip /opt/ddpjob
WORKDIR /src
COPY pins/operator.txt ./
# Install dependencies first, because they change less often than our code.
# `pip check` finds a dependency that pins/ lacks. It runs before our wheel is installed, because the wheel also requires
# packages of the command line that this image leaves out (tools/pins.py).
RUN pip --python /opt/ddpjob/bin/python install --no-cache-dir --no-deps --require-hashes -r operator.txt \
 && pip --python /opt/ddpjob/bin/python check
COPY --from=wheel /wheel /wheel
# Keep only those of our packages that the operator imports, and import all of their files.
RUN pip --python /opt/ddpjob/bin/python install --no-cache-dir --no-deps --no-index /wheel/*.whl \
 && cd /opt/ddpjob && rm -r bin/ddpjob bin/ddprun bin/kubectl-ddp \
 && for name in ddpjob ddpjob_check ddpjob_cli ddpjob_convert ddprun; do rm -r lib/python3*/site-packages/$name; done \
 && bin/python -c "import pkgutil, ddpjob_core, ddpjob_operator as operator; print(*(__import__(found.name).__name__ \
        for top in (ddpjob_core, operator) for found in pkgutil.walk_packages(top.__path__, top.__name__ + '.')))"


FROM ${PYTHON_IMAGE} AS operator
LABEL org.opencontainers.image.title="ddpjob-operator" \
      org.opencontainers.image.description="Runs PyTorch DDP jobs (DDPJob) on Kubernetes" \
      org.opencontainers.image.licenses="Apache-2.0"
# Remove pip and its bundled packages, because nothing is installed in a running operator.
RUN rm -rf $(python -c "import importlib.util as u; print(*(folder \
        for name in ('pip', 'setuptools', 'pkg_resources', 'wheel', '_distutils_hack', 'ensurepip') \
        for found in [u.find_spec(name)] if found for folder in found.submodule_search_locations))")
COPY --from=operator-environment /opt/ddpjob /opt/ddpjob
# USER is set, because kopf calls getpass.getuser(), and only root has a user name in this image.
ENV PATH=/opt/ddpjob/bin:$PATH HOME=/tmp USER=ddpjob PYTHONUNBUFFERED=1
WORKDIR /tmp
USER 65532:65532
ENTRYPOINT ["python", "-m", "ddpjob_operator"]


FROM ${PYTHON_IMAGE} AS trainer
LABEL org.opencontainers.image.title="ddpjob-trainer" \
      org.opencontainers.image.description="PyTorch, the ddpjob library and its examples" \
      org.opencontainers.image.licenses="Apache-2.0"
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX=
# torch calls getpass.getuser(), so the uid needs a name. HOME is /tmp, which is writable with a read-only root, too.
RUN useradd --uid 65532 --user-group --no-create-home --home-dir /tmp ddpjob \
 # Group 0 owns it, because clusters that assign a uid to each namespace keep this group.
 && install -d -o 65532 -g 0 -m 0775 /workspace
ARG TORCH_SHA256=
COPY pins/trainer.txt constraints.txt /tmp/pins/
RUN pip install --no-cache-dir --no-deps --require-hashes -r /tmp/pins/trainer.txt
# Its own layer, because it is large and does not change with our code. The first pip installs torch, and only the wheel
# with the hash if one is set. The second pip adds the CUDA libraries that this wheel requires.
RUN grep -v '^torch==' /tmp/pins/constraints.txt > /etc/pip-constraints.txt \
 && echo "torch==${TORCH_VERSION}${TORCH_SHA256:+ --hash=sha256:$TORCH_SHA256}" > /tmp/pins/torch.txt \
 && pip install --no-cache-dir --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r /tmp/pins/torch.txt \
 && pip install --no-cache-dir -c /etc/pip-constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        "torch==${TORCH_VERSION}" \
 && rm -r /tmp/pins
COPY --from=wheel /wheel /tmp/wheel
# `pip check` finds a dependency that pins/ lacks.
RUN pip install --no-cache-dir --no-deps --no-index /tmp/wheel/*.whl \
 && pip check \
 && rm -r /tmp/wheel
COPY trainer/examples /workspace/trainer/examples
ENV HOME=/tmp USER=ddpjob PYTHONUNBUFFERED=1
WORKDIR /workspace
USER 65532:65532
