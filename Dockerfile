# Two images: the operator, and a trainer with PyTorch and the examples.
#
#   docker build --target operator -t ddpjob-operator:0.1.0 .
#   docker build --target trainer  -t ddpjob-trainer .
#
# PyTorch comes from pip's own index, which has the wheel for one CUDA, unless TORCH_INDEX adds another: that of the much
# smaller CPU wheels, or of those for your driver's CUDA.   --build-arg TORCH_INDEX=https://…/whl/cpu
#
# Everything else is installed by the hashes in pins/, which `make pins` writes for x86_64 and aarch64. The hash of torch
# depends on that choice: --build-arg TORCH_SHA256=… takes no other wheel. For a release, pin the base image too:
#   --build-arg PYTHON_IMAGE=$(cat pins/python-image.txt)
# The tag is the default, because a builder without a registry knows its local image by the tag alone. A newer digest:
#   docker buildx imagetools inspect python:3.11-slim-bookworm
#
# Both run as uid 65532 and write nothing but /tmp (and, the trainer, its working directory): with a read-only root
# they want an emptyDir there.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm


# Our wheel. What builds it stays behind in this stage.
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
# The dependencies first: they change less often than our code.
RUN pip --python /opt/ddpjob/bin/python install --no-cache-dir --no-deps --require-hashes -r operator.txt
COPY --from=wheel /wheel /wheel
# The check finds a dependency that pins/ lacks. Of our packages only the operator stays, with what it shares with agents.
RUN pip --python /opt/ddpjob/bin/python install --no-cache-dir --no-deps --no-index /wheel/*.whl \
 && pip --python /opt/ddpjob/bin/python check \
 && cd /opt/ddpjob && rm -r bin/ddpjob bin/ddprun bin/kubectl-ddp \
 && for name in ddpjob ddpjob_check ddpjob_cli ddpjob_convert ddprun; do rm -r lib/python3*/site-packages/$name; done \
 && bin/python -c "import ddpjob_operator.kube.program"


FROM ${PYTHON_IMAGE} AS operator
LABEL org.opencontainers.image.title="ddpjob-operator" \
      org.opencontainers.image.description="Runs PyTorch DDP jobs (DDPJob) on Kubernetes" \
      org.opencontainers.image.licenses="Apache-2.0"
# The base image brings pip and its bundled copies; nothing is ever installed in a running operator.
RUN rm -rf $(python -c "import importlib.util as u; print(*(folder \
        for name in ('pip', 'setuptools', 'pkg_resources', 'wheel', '_distutils_hack', 'ensurepip') \
        for found in [u.find_spec(name)] if found for folder in found.submodule_search_locations))")
COPY --from=operator-environment /opt/ddpjob /opt/ddpjob
# USER: kopf asks getpass for a name, and no uid but root's has one here.
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
# A name for the uid, for torch asks getpass for one; HOME is /tmp, which stays writable under a read-only root.
RUN useradd --uid 65532 --user-group --no-create-home --home-dir /tmp ddpjob \
 # Group 0 as well: a cluster that gives every namespace a uid of its own keeps this group.
 && install -d -o 65532 -g 0 -m 0775 /workspace
ARG TORCH_SHA256=
COPY pins/trainer.txt constraints.txt /tmp/pins/
RUN pip install --no-cache-dir --no-deps --require-hashes -r /tmp/pins/trainer.txt
# A layer of its own: it is large, and stays the same when our code changes. The first pip takes no wheel but that with
# the hash; the second adds the CUDA libraries that the wheel names by version, where it names some.
RUN grep -v '^torch==' /tmp/pins/constraints.txt > /etc/pip-constraints.txt \
 && echo "torch==${TORCH_VERSION}${TORCH_SHA256:+ --hash=sha256:$TORCH_SHA256}" > /tmp/pins/torch.txt \
 && pip install --no-cache-dir --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r /tmp/pins/torch.txt \
 && pip install --no-cache-dir -c /etc/pip-constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        "torch==${TORCH_VERSION}" \
 && rm -r /tmp/pins
COPY --from=wheel /wheel /tmp/wheel
# The check finds a dependency that pins/ lacks.
RUN pip install --no-cache-dir --no-deps --no-index /tmp/wheel/*.whl \
 && pip check \
 && rm -r /tmp/wheel
COPY trainer/examples /workspace/trainer/examples
ENV HOME=/tmp USER=ddpjob PYTHONUNBUFFERED=1
WORKDIR /workspace
USER 65532:65532
