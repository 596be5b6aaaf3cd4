# ds4: make builds ./ds4, libds4.a and libds4.so; make test tests; make demo shows speculation on the bundled pair.
#
# The flags that bits depend on are not in CFLAGS, so that whoever sets those keeps them: no contraction of a*b+c into fma
# (the code writes fma where it means it), no fast math. Kernels for newer instruction sets are chosen at run time.
CC ?= cc
CFLAGS ?= -O3 -g1
PREFIX ?= /usr/local
WARN = -Wall -Wextra -Wshadow -Wconversion
EXACT = -std=c11 -D_GNU_SOURCE -ffp-contract=off -fno-fast-math -fPIC -pthread
BUILD = $(CC) $(CPPFLAGS) $(CFLAGS) $(EXACT) $(WARN)
PYTHON ?= python3
VENV = .venv
# Two workers, a file of tests to each: nothing is timed.
PYTEST = $(VENV)/bin/python -m pytest -q -n 2 --dist loadfile
MODEL = models/small.gguf
HEAD = models/small-mtp.gguf

all: ds4 libds4.a libds4.so

build:
	mkdir -p build

build/ds4.o: ds4.c ds4.h ds4_tables.inc ds4_unicode.inc | build
	$(BUILD) -c ds4.c -o $@

build/ds4_cli.o: ds4_cli.c ds4.h ds4_help.h | build
	$(BUILD) -c ds4_cli.c -o $@

build/ds4_help.o: ds4_help.c ds4_help.h | build
	$(BUILD) -c ds4_help.c -o $@

ds4: build/ds4_cli.o build/ds4_help.o build/ds4.o
	$(BUILD) $(LDFLAGS) $^ -o $@ -lm

libds4.a: build/ds4.o
	$(AR) rcs $@ $^

libds4.so: build/ds4.o
	$(BUILD) $(LDFLAGS) -shared -Wl,-soname,libds4.so $^ -o $@ -lm

install: all
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/share/ds4
	install -m 755 ds4 $(DESTDIR)$(PREFIX)/bin/
	install -m 644 libds4.a $(DESTDIR)$(PREFIX)/lib/
	install -m 755 libds4.so $(DESTDIR)$(PREFIX)/lib/
	install -m 644 ds4.h $(DESTDIR)$(PREFIX)/include/
	install -m 644 $(MODEL) $(HEAD) $(DESTDIR)$(PREFIX)/share/ds4/

# The Python package's extension, built in place: for PYTHONPATH=python. $(PYTHON) needs setuptools and cffi.
extension: python/ds4/_ds4.abi3.so
python/ds4/_ds4.abi3.so: setup.py python/ds4/_build.py Makefile ds4.c ds4.h ds4_tables.inc ds4_unicode.inc | build
	$(PYTHON) setup.py -q build_ext -f --inplace --build-temp build/python --build-lib build/python/lib

# The reference of the package, from its docstrings. $(PYTHON) needs pdoc and typing_extensions.
DOCS = build/docs
DOC_MODULES = ds4 ds4.engine ds4.model ds4.sampling ds4.batch ds4.generation ds4.errors ds4.registry ds4.names
docs: extension
	cd python && $(abspath $(PYTHON)) -W error -m pdoc -o $(abspath $(DOCS)) $(DOC_MODULES)

# ---- measuring ----

build/read_speed: tests/measure/read_speed.c | build
	$(BUILD) $< -o $@

build/ds4_frames: ds4_cli.c ds4_help.c ds4.c ds4.h | build
	$(BUILD) -fno-omit-frame-pointer -fno-optimize-sibling-calls -fno-inline ds4_cli.c ds4_help.c ds4.c -o $@ -lm

# Speeds beside a peer's on the same files; docs/performance.md. $(PYTHON) needs numpy, gguf and click; BENCH="--help" says more.
bench: extension build/read_speed
	PYTHONPATH=python:tests $(PYTHON) -m measure $(BENCH)

# ---- tests ----

# The engine with its insides reachable, for the Python tests; the C program of the documentation, against the library.
build/hooks.so: tests/hooks.c tests/*.inc ds4.c ds4.h ds4_tables.inc ds4_unicode.inc | build
	$(BUILD) -Wno-unused-function -shared tests/hooks.c -o $@ -lm

build/hooks_faults.so: tests/hooks.c tests/*.inc ds4.c ds4.h ds4_tables.inc ds4_unicode.inc | build
	$(BUILD) -O1 -DDS4_FAULTS -Wno-unused-function -shared tests/hooks.c -o $@ -lm

# The same with AMX's tile registers in C.
build/hooks_tiles.so: tests/hooks.c tests/tiles.h tests/*.inc ds4.c ds4.h ds4_tables.inc ds4_unicode.inc | build
	$(BUILD) -O1 -include tests/tiles.h -Wno-unused-function -shared tests/hooks.c -o $@ -lm

build/test_api: tests/test_api.c libds4.a ds4.h
	$(BUILD) -I. tests/test_api.c libds4.a -o $@ -lm

build/test_api_shared: tests/test_api.c libds4.so ds4.h
	$(BUILD) -I. tests/test_api.c -L. -lds4 -Wl,-rpath,'$$ORIGIN/..' -o $@ -lm

# Broken files, fuzzing and threads, under sanitizers. Each program includes ds4.c.
SANITIZER = $(shell command -v clang-19 || echo gcc)
CHECKED = $(SANITIZER) -O1 -g1 -DDS4_PLAIN $(EXACT) -Wall -Wextra -Wno-unused-function -fno-sanitize-recover=all

build/hostile: tests/hostile.c ds4.c ds4.h ds4_tables.inc ds4_unicode.inc | build
	$(CHECKED) -fsanitize=address,undefined tests/hostile.c -o $@ -lm

build/hostile_plain: tests/hostile.c ds4.c ds4.h ds4_tables.inc ds4_unicode.inc | build
	$(BUILD) -Wno-unused-function tests/hostile.c -o $@ -lm

build/test_threads: tests/test_threads.c libds4.a ds4.h
	$(BUILD) -I. tests/test_threads.c libds4.a -o $@ -lm

build/test_threads_tsan: tests/test_threads.c ds4.c ds4.h ds4_tables.inc ds4_unicode.inc | build
	clang-19 -O1 -g1 -DDS4_PLAIN $(EXACT) -fsanitize=thread -I. tests/test_threads.c ds4.c -o $@ -lm

check-tsan: build/test_threads_tsan
	TSAN_OPTIONS=halt_on_error=1 build/test_threads_tsan $(TINY)

FUZZERS = gguf tokenizer chat snapshot
FUZZ_SECONDS ?= 60
# Sums are alike whatever the input is: counting their branches would take most of the time.
build/fuzz_%: tests/fuzz_%.c tests/fuzz_sums.txt tests/ds4_plain.h ds4.c ds4.h ds4_tables.inc ds4_unicode.inc | build
	clang-19 -O2 -g1 -DDS4_PLAIN $(EXACT) -DDS4_FAULTS -Wall -Wextra -Wno-unused-function -fsanitize=fuzzer,address,undefined \
	    -fsanitize-coverage-ignorelist=tests/fuzz_sums.txt -fno-sanitize-recover=all $< -o $@ -lm

# Each target for FUZZ_SECONDS, from the corpus in tests/; an input that fails ends it and is left in build/. One after the other,
# or two at a time: make -j2 fuzz
fuzz: $(FUZZERS:%=fuzz-%)

$(FUZZERS:%=fuzz-%): fuzz-%: build/fuzz_%
	@mkdir -p build/corpus/$*
	@echo "fuzz_$*: $(FUZZ_SECONDS) seconds"
	@build/fuzz_$* -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=64 -max_len=32768 -artifact_prefix=build/ \
	    -verbosity=0 -print_final_stats=1 build/corpus/$* tests/corpus/$* >build/fuzz_$*.log 2>&1 || { tail -n 80 build/fuzz_$*.log; exit 1; }
	@grep number_of_executed build/fuzz_$*.log

$(VENV)/ready: tests/requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r tests/requirements.txt
	touch $@

check-c: build/test_api build/test_api_shared build/test_threads
	build/test_api tests/data/tiny/target.gguf tests/data/tiny/head-ds4.gguf
	build/test_api_shared tests/data/tiny/target.gguf tests/data/tiny/head-ds4.gguf
	build/test_threads tests/data/tiny/target.gguf tests/data/tiny/head-ds4.gguf

# Warnings as errors, with every compiler that is installed; aarch64 is compiled, not run.
check-portable: | build
	@for cc in gcc clang clang-19 aarch64-linux-gnu-gcc; do \
	    command -v $$cc >/dev/null || { echo "$$cc: not installed"; continue; }; \
	    for f in ds4 ds4_cli ds4_help; do \
	        $$cc -O1 $(EXACT) $(WARN) -Werror -c $$f.c -o build/portable.o || exit 1; \
	    done; \
	    echo "$$cc: ok"; \
	done

# The C test under valgrind, and under ASan and UBSan.
TINY = tests/data/tiny/target.gguf tests/data/tiny/head-ds4.gguf
check-memory: build/test_api
	@if command -v valgrind >/dev/null; then \
	    valgrind -q --error-exitcode=1 --leak-check=full --errors-for-leak-kinds=all build/test_api $(TINY); \
	else echo "valgrind: not installed"; fi
	@if command -v clang-19 >/dev/null; then \
	    clang-19 -O1 -g1 -DDS4_PLAIN $(EXACT) -fsanitize=address,undefined -fno-sanitize-recover=all -I. tests/test_api.c ds4.c -o build/test_api_asan -lm && \
	    build/test_api_asan $(TINY); \
	else echo "clang-19: not installed"; fi

# What the tests run, compiled two at a time: each holds all of ds4.c.
TEST_PROGRAMS = build/hooks.so build/hooks_faults.so build/test_api build/test_api_shared build/test_threads build/hostile build/hostile_plain build/read_speed

test: $(VENV)/ready
	@$(MAKE) -j2 -O all $(TEST_PROGRAMS) extension PYTHON=$(VENV)/bin/python
	@$(MAKE) -s check-c
	$(PYTEST) tests

# Everything: long fuzzing, the full sweeps. An hour or so.
check-deep: $(VENV)/ready
	@$(MAKE) -j2 -O all $(TEST_PROGRAMS) extension PYTHON=$(VENV)/bin/python
	@$(MAKE) -s check-c
	DS4_DEEP=1 $(PYTEST) tests

demo: all
	@sh tests/demo.sh ./ds4 $(MODEL) $(HEAD)

clean:
	rm -rf build ds4 libds4.a libds4.so python/ds4/_ds4.abi3.so

.PHONY: all install extension docs bench fuzz $(FUZZERS:%=fuzz-%) check-tsan check-c check-portable check-memory check-deep test demo clean
