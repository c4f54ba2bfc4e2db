// What Gorgonia's CUDA machine needs of a machine without a GPU, for the tests of
// the build tag cuda: driver.c with contexts that are made and destroyed, kernels
// that compute, and the few functions of cuBLAS and cuDNN that those tests come
// by. Built as libcuda.so.1, and found by the names of the other two as well:
// see .ci/run.
#define cuCtxPushCurrent_v2 one_push
#define cuCtxPopCurrent_v2 one_pop
#define cuDeviceGetAttribute any_attribute
#define cuModuleLoadData load_image
#define cuModuleGetFunction get_sized_function
#define cuLaunchKernel say_launch
#define cuLaunchKernelEx say_launch_ex
#define NO_CONTEXT (!live_context())
static int live_context(void);
#include "driver.c"
#undef cuCtxPushCurrent_v2
#undef cuCtxPopCurrent_v2
#undef cuDeviceGetAttribute
#undef cuModuleLoadData
#undef cuModuleGetFunction
#undef cuLaunchKernel
#undef cuLaunchKernelEx
#include <math.h>
#include <unistd.h>

__attribute__((constructor)) static void start(void) {
	fake_reset();
	f.total = 1ll << 34;
}

// Calls on what is gone end the process: Gorgonia would not notice.
__attribute__((destructor)) static void end(void) {
	if (!defects) return;
	fprintf(stderr, "%d calls that a real driver would crash on\n", defects);
	_Exit(3);
}

result cuDeviceGetAttribute(int *v, int id, int dev) {
	switch (id) {
	case 1: *v = 1024; return OK;                                 // threads of a block
	case 2: case 3: case 4: case 5: case 6: case 7: *v = 65535; return OK; // sizes of blocks and grids
	case 16: *v = 13; return OK;                                  // multiprocessors
	case 97: *v = 232448; return OK;                              // shared memory of a block
	}
	return any_attribute(v, id, dev);
}

// Contexts. Destroyed ones stay, so that their use is seen: also by a thread that
// has one which another thread destroyed. To take one for the first time takes a
// while, as in a real driver where other threads have calls. Go lets others run
// meanwhile; if they leave no place when the call returns, its caller goes on
// later and, unless it is locked to its thread, on another: without a context.
struct context { int alive, taken; };
static __thread void *stack[64];
static int live_context(void) { return depth && (is_primary(current) || ((struct context *)current)->alive); }
static int usable(void *c) {
	if (is_primary(c) || ((struct context *)c)->alive) return 1;
	defects++;
	return 0;
}
result cuCtxPushCurrent_v2(void *c) {
	if (!usable(c)) return INVALID_CONTEXT;
	stack[depth++] = current = c;
	return OK;
}
result cuCtxPopCurrent_v2(void **c) {
	if (!depth) return INVALID_CONTEXT;
	if (c) *c = current;
	current = --depth ? stack[depth - 1] : 0;
	return OK;
}
result cuCtxCreate_v2(void **c, unsigned flags, int dev) {
	struct context *x = calloc(1, sizeof *x);
	x->alive = 1;
	stack[depth++] = current = *c = x;
	return OK;
}
result cuCtxSetCurrent(void *c) {
	if (!usable(c)) return INVALID_CONTEXT;
	if (!is_primary(c) && !((struct context *)c)->taken++) usleep(20000);
	if (!depth) depth = 1;
	stack[depth - 1] = current = c;
	return OK;
}
result cuCtxDestroy_v2(void *c) {
	pthread_mutex_lock(&lock);
	((struct context *)c)->alive = 0;
	for (int kind = 0; kind < KINDS; kind++) for (struct object *o = all[kind]; o; o = o->next) {
		if (!o->alive || o->owner != c) continue;
		o->alive = 0;
		if (o->mem) free(o->mem);
		if (o->kind == BUFFER) primaries[0].memory -= o->size;
	}
	return done(OK);
}

result cuMemAllocManaged(uint64_t *p, size_t n, unsigned flags) { return cuMemAlloc_v2(p, n); }
static result move(uint64_t to, uint64_t from, size_t n, uint64_t on_device) {
	pthread_mutex_lock(&lock);
	if (!to || !from || !within(BUFFER, on_device, n, current)) return done(INVALID_VALUE);
	memcpy((void *)to, (void *)from, n);
	return done(OK);
}
result cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t n) { return move(to, (uint64_t)from, n, to); }
result cuMemcpyDtoH_v2(void *to, uint64_t from, size_t n) { return move((uint64_t)to, from, n, from); }
result cuMemcpy(uint64_t to, uint64_t from, size_t n) { return move(to, from, n, to); }

// Kernels. Types are numbered as in kernels/types.cuh.
enum { F32 = 0, F16 = 2, BF16 = 3 };
// A type that kernels do not know stops them.
static void known(int type) {
	if (type != F32 && type != F16 && type != BF16) abort();
}
static float get(uint64_t at, int64_t i, int type) {
	known(type);
	if (type == F32) return ((float *)at)[i];
	if (type == F16) return (float)((_Float16 *)at)[i];
	uint32_t bits = (uint32_t)((uint16_t *)at)[i] << 16;
	float x;
	memcpy(&x, &bits, 4);
	return x;
}
static void put(uint64_t at, int64_t i, int type, float x) {
	uint32_t bits;
	memcpy(&bits, &x, 4);
	known(type);
	if (type == F32) ((float *)at)[i] = x;
	else if (type == F16) ((_Float16 *)at)[i] = (_Float16)x;
	else ((uint16_t *)at)[i] = (bits + (x == x ? 0x7fff + ((bits >> 16) & 1) : 0)) >> 16;
}

// The structs of kernels/attn_work.cuh and kernels/attn_append.cuh.
struct append { uint64_t new_keys, new_values, keys, values, slots; int head_rows, heads, dim, new_type, type, row; };
struct seq { int row, queries, keys, pages; };
struct work {
	int seq, head, block, tile, tiles, host, sharers, guests;
	struct seq first;
	int whole_seq, whole_head, whole_block, whole_tiles;
	struct seq first_whole;
};
struct params {
	char maps[256];
	uint64_t keys, values, query, out, lse, work, seqs, pages, masked, partials, counters;
	int64_t query_row, query_head, out_row, out_head, lse_row, lse_head;
	int page_rows, head_rows, page_tokens, heads, group, tile_shift, box, rows, warps, slots, buffers, parts, causal;
	int query_type, out_type, early, streamed;
	float scale, per_group;
};

static void append(const struct append *p, int rows) {
	for (int row = 0; row < rows; row++) {
		int slot = ((int *)p->slots)[row];
		for (int i = 0; slot >= 0 && i < p->heads * p->dim; i++) {
			int64_t to = (int64_t)(slot + i / p->dim * p->head_rows) * p->dim + i % p->dim, from = (int64_t)row * p->row + i;
			put(p->keys, to, p->type, get(p->new_keys, from, p->new_type));
			if (p->values) put(p->values, to, p->type, get(p->new_values, from, p->new_type));
		}
	}
}

static int sees(const struct params *p, const struct seq *s, int query) {
	int n = p->causal ? s->keys - s->queries + query + 1 : s->keys;
	return n > 0 ? n : 0;
}

// reached counts the sequences up to the last one of `left` LeanTiles, from one of an output tile on.
static int reached(const struct params *p, int tile, int seq, int head, int block, int skip, int left) {
	int n = 0;
	while (left > 0) {
		const struct seq *s = (struct seq *)p->seqs + seq;
		int rows = s->queries * p->group, last = block * 16 + 15 < rows ? block * 16 + 15 : rows - 1;
		left -= (sees(p, s, last / p->group) + tile - 1) / tile - skip, skip = 0;
		n = seq + 1;
		if (++block * 16 >= rows) block = 0, head++;
		if (head == p->heads) head = 0, seq++;
	}
	return n;
}

// sequences counts them: they are as many as thread blocks have work of.
static int sequences(const struct params *p, int blocks, int tile) {
	int n = 0;
	for (const struct work *w = (void *)p->work, *stop = w + blocks; w < stop; w++) {
		int parts = reached(p, tile, w->seq, w->head, w->block, w->tile, w->tiles);
		int wholes = reached(p, tile, w->whole_seq, w->whole_head, w->whole_block, 0, w->whole_tiles);
		if (parts > n) n = parts;
		if (wholes > n) n = wholes;
	}
	return n;
}

static void attend(const struct params *p, int blocks, int type, int dim) {
	int size = type == F32 ? 4 : 2, chunk = 32 / size, heads = p->heads * p->group;
	chunk *= dim * size <= 128 ? 4 : dim * size <= 256 ? 2 : 1;
	const int *masked = (int *)p->masked;
	for (int i = 1; i <= masked[0]; i++)
		for (int h = 0; h < heads; h++) {
			for (int c = 0; c < dim; c++) put(p->out, masked[i] * p->out_row + h * p->out_head + c, p->out_type, 0);
			if (p->lse) ((float *)p->lse)[masked[i] * p->lse_row + h * p->lse_head] = -INFINITY;
		}
	int n = sequences(p, blocks, chunk << p->tile_shift);
	for (const struct seq *s = (void *)p->seqs, *stop = s + n; s < stop; s++)
		for (int i = 0; i < s->queries * heads; i++) {
			int query = i / heads, h = i % heads, row = s->row + query, keys = sees(p, s, query);
			if (!keys) continue;
			double most = -INFINITY, sum = 0, out[256] = {0}, *x = calloc(keys, sizeof *x);
			int64_t *at = calloc(keys, sizeof *at);
			for (int j = 0; j < keys; j++) {
				int page = p->pages ? ((int *)p->pages)[s->pages + j / p->page_tokens] : s->pages;
				at[j] = ((int64_t)page * p->page_rows + h / p->group * p->head_rows + j % p->page_tokens) * dim;
				for (int c = 0; c < dim; c++) x[j] += (double)get(p->query, row * p->query_row + h * p->query_head + c, p->query_type) * get(p->keys, at[j] + c, type);
				x[j] *= p->scale;
				if (x[j] > most) most = x[j];
			}
			for (int j = 0; j < keys; j++) {
				double e = exp2(2 * (x[j] - most));
				sum += e;
				for (int c = 0; c < dim; c++) out[c] += e * get(p->values, at[j] + c, type);
			}
			for (int c = 0; c < dim; c++) put(p->out, row * p->out_row + h * p->out_head + c, p->out_type, out[c] / sum);
			if (p->lse) ((float *)p->lse)[row * p->lse_row + h * p->lse_head] = 2 * M_LN2 * most + log(sum);
			free(x), free(at);
		}
}

// elementwise is a kernel of Gorgonia's: add_vv_f32 and so on.
static void elementwise(const char *name, void **params) {
	float *a = *(float **)params[0], *b = *(float **)params[1]; // b of binary ones only
	int unary = !strcmp(name, "tanh_f32"), n = *(int *)params[unary ? 1 : 2];
	int add = !strncmp(name, "add_", 4), one_a = !!strstr(name, "_sv_"), one_b = !!strstr(name, "_vs_") || !!strstr(name, "_ss_");
	if (!unary && !add && strncmp(name, "mul_", 4)) {
		fprintf(stderr, "no kernel %s here\n", name);
		_Exit(3);
	}
	for (int i = 0; i < n; i++) {
		if (unary) {
			a[i] = tanhf(a[i]);
			continue;
		}
		float x = a[one_a ? 0 : i], y = b[one_b ? 0 : i];
		(one_a ? b : a)[i] = add ? x + y : x * y;
	}
}

static result launch(struct object *fn, unsigned blocks, void **params) {
	int dim = 0; // of lean_<type>_<dim> and packed_<type>_<dim>, and of what may follow
	char type[8] = "";
	if (sscanf(fn->name, "lean_%7[^_]_%d", type, &dim) < 2) sscanf(fn->name, "packed_%7[^_]_%d", type, &dim);
	if (!strcmp(fn->name, "append_rows")) append(params[0], blocks);
	else if (!strcmp(type, "bf16")) attend(params[0], blocks, BF16, dim);
	else if (!strcmp(type, "f16")) attend(params[0], blocks, F16, dim);
	else if (!strcmp(type, "f32")) attend(params[0], blocks, F32, dim);
	else if (!strcmp(fn->name, "copy_pieces")) return copy_pieces(params[0], blocks, current);
	else elementwise(fn->name, params);
	return OK;
}
// ours finds what is of the current context: a kernel is loaded into one.
static struct object *ours(enum kind kind, void *id) {
	struct object *o = find(kind, (uintptr_t)id);
	if (!o || o->owner == current) return o;
	defects++;
	fprintf(stderr, "a handle of kind %d of another context\n", kind);
	return 0;
}
result cuModuleLoadData(void **m, const char *image) { return load_image(m, "image"); }
result cuModuleGetFunction(void **fn, void *m, const char *name) { return get_sized_function(fn, m, name); }
result cuLaunchKernel(struct object *fn, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz,
                      unsigned shared, void *s, void **params, void **extra) {
	CALL(1);
	if (!ours(FUNCTION, fn) || (s && !ours(STREAM, s))) return done(INVALID_HANDLE);
	return done(launch(fn, x, params));
}
result cuLaunchKernelEx(const struct config *c, struct object *fn, void **params, void **extra) {
	CALL(1);
	if (!ours(FUNCTION, fn) || !ours(STREAM, c->stream)) return done(INVALID_HANDLE);
	return done(launch(fn, c->x, params));
}

// cuBLAS and cuDNN.
static int handle;
int cublasCreate_v2(void **h) { *h = &handle; return 0; }
int cublasDestroy_v2(void *h) { return 0; }
int cublasSgemm_v2(void *h, int ta, int tb, int m, int n, int k, const float *alpha, const float *a, int lda, const float *b, int ldb,
                   const float *beta, float *c, int ldc) {
	for (int i = 0; i < m; i++)
		for (int j = 0; j < n; j++) {
			double sum = 0;
			for (int l = 0; l < k; l++) sum += (double)a[ta ? i * lda + l : l * lda + i] * b[tb ? l * ldb + j : j * ldb + l];
			c[j * ldc + i] = *alpha * sum + (*beta ? *beta * c[j * ldc + i] : 0);
		}
	return 0;
}
int cudnnCreate(void **h) { *h = &handle; return 0; }
int cudnnDestroy(void *h) { return 0; }
const char *cudnnGetErrorString(int status) { return "no cuDNN here"; }
