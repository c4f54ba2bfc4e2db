package attention

import (
	"testing"

	"gorgonia.org/leanattention/internal/gpu/testgpu"
)

// What shape.go mirrors is still what the kernels do.
func TestShapeIsTheKernels(t *testing.T) {
	for file, lines := range map[string][]string{
		"work.cuh": {
			"constexpr int ROWS = 16;",
			"constexpr int TOGETHER = -1;",
			"constexpr int OPENING = 16;", // openingEntries
			"constexpr int COMPUTERS = 4; constexpr int COPIERS = 4;",
			"#ifdef __CUDA_ARCH_FEAT_SM90_ALL constexpr int FINISHERS = 4; #else constexpr int FINISHERS = 0; #endif",
		},
		"reduce.cuh": {
			"constexpr int STATES = COMPUTERS;",
			"float* o; float4* m; float4* l; int* last;",
			"HELPED = 8,", // leastMany
		},
		"ring.cuh": {
			"#if __CUDA_ARCH__ >= 900 static constexpr int MORE = LINKED ? 1 : 2; #else static constexpr int MORE = 1; #endif static constexpr int KEYS",
			"constexpr int KEYS = D * T::bytes <= 128 ? 2 * MORE * T::depth : D * T::bytes <= 256 ? MORE * T::depth : T::depth;",
			"constexpr int BLOCK = KEYS * 128;",
			"MANY = S::PAGED ? 160 / BLOCKS : 160;", // testManyTiles
			"constexpr int BLOCKS = (D * T::bytes + 127) / 128;",
			"constexpr int SLOT = 2 * BLOCKS * BLOCK;",
			"constexpr int WIDTH = D + 8;",
			"constexpr bool SHARED_QUERY = D * T::bytes > 256;",
			"constexpr int STEPS = T::bytes == 2 ? D / 16 : D / 8;",
			"constexpr int QUERY = SHARED_QUERY ? STEPS * 32 * 16 * (T::bytes == 2 ? 2 : 1) : 0;",
		},
		"lean.cuh": {
			"constexpr int MOST = 8; static constexpr bool EARLY = S::BLOCKS == 1;", // TestConfigure
			"u64* bars = (u64*)(memory + slots * S::SLOT); u64* rooms = bars + 2 * slots; char* rest = (char*)(rooms + 6); typename R::Shared sh; sh.warps = warps, sh.rooms = p.rooms; sh.last = (int*)(rooms + 4); " +
				"sh.o = (float*)(rest + S::QUERY); sh.m = (float4*)(sh.o + sh.rooms * warps * p.rows * S::WIDTH); sh.l = sh.m + sh.rooms * ROWS;",
		},
		"lean.cu": {"ATTENTION(lean_f16_128_many, Half, 128, true) ATTENTION(lean_bf16_128_many, Brain, 128, true)",
			"ATTENTION(lean_f16_64_paged, Half, 64, false, true) ATTENTION(lean_bf16_64_paged, Brain, 64, false, true)"},
		"prefill.cuh": {
			"constexpr int ROWS = GROUPS * 64; static constexpr int KEYS = 128;",
			"constexpr int QUERY = ROWS * D * 2; static constexpr int STAGE = KEYS * D * 2; static constexpr int THREADS = (GROUPS + 1) * 128;",
			"const int i = n * gridDim.x + (n & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);", // prefillPays
		},
		"prefill.cu": {"PREFILL(prefill_f16_64, Half, 64, 3, 4) PREFILL(prefill_f16_128, Half, 128, 2, 2) PREFILL(prefill_bf16_64, Brain, 64, 3, 4) PREFILL(prefill_bf16_128, Brain, 128, 2, 2)"},
	} {
		testgpu.Says(t, file, lines...)
	}
}

// The Go structs are those of the kernels, field by field.
func TestStructs(t *testing.T) {
	for _, c := range []struct {
		file, name string
		here       any
	}{
		{"kernels/work.cuh", "Seq", sequence{}},
		{"kernels/work.cuh", "Work", work{}},
		{"kernels/work.cuh", "Params", Params{}},
		{"kernels/work.cuh", "MeetParams", meetParams{}},
		{"kernels/work.cuh", "LaunchParams", params{}},
		{"kernels/append.cuh", "AppendParams", appendParams{}},
		{"kernels/unfused.cuh", "UnfusedParams", unfusedParams{}},
		{"kernels/prefill.cuh", "PrefillTile", prefillTile{}},
		{"kernels/prefill.cuh", "PrefillParams", prefillParams{}},
		{"internal/cuda/fakedriver/testdata/machine.c", "work", work{}}, // a driver that computes: the tag cuda
	} {
		testgpu.SameStruct(t, c.file, c.name, c.here)
	}
}
