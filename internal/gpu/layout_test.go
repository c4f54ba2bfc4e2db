package gpu

import (
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/cuda"
)

// field is one of a C struct.
type field struct {
	name         string
	offset, size uintptr
}

// cStruct reads a struct of a header: its fields, its size and its alignment.
func cStruct(t *testing.T, file, name string) (fields []field, size uintptr) {
	t.Helper()
	text, err := os.ReadFile("../../kernels/" + file)
	if err != nil {
		t.Fatal(err)
	}
	src := regexp.MustCompile(`(?s)#ifdef TRACING.*?#endif`).ReplaceAllString(string(text), "")
	src = regexp.MustCompile(`//[^\n]*`).ReplaceAllString(src, "")
	body := regexp.MustCompile(`(?s)struct (?:alignas\((\d+)\) )?` + name + ` \{(.*?)\n\};`).FindStringSubmatch(src)
	if body == nil {
		t.Fatalf("%s has no struct %s", file, name)
	}
	align := uintptr(1)
	if body[1] != "" {
		n, err := strconv.Atoi(body[1])
		if err != nil {
			t.Fatalf("%s: struct %s: alignment %s", file, name, body[1])
		}
		align = uintptr(n)
	}
	types := map[string][2]uintptr{ // size, alignment
		"int": {4, 4}, "u16": {2, 2}, "u32": {4, 4}, "u64": {8, 8}, "float": {4, 4}, "double": {8, 8}, "long long": {8, 8}, "TensorMap": {128, 64}, "Seq": {16, 16}, "char": {1, 1},
		"Params": {216, 8}, "MeetParams": {24, 8}, "Links": {56, 8}, "LinearParams": {unsafe.Sizeof(linearParams{}), 64},
		"ChainParams": {unsafe.Sizeof(chainParams{}), 8}, "ChainEnds": {unsafe.Sizeof(chainEnds{}), 8}, "ChainAffine": {unsafe.Sizeof(chainAffine{}), 8}, "GatherParams": {unsafe.Sizeof(gatherParams{}), 8},
		"BatchParams": {unsafe.Sizeof(batchParams{}), 64}, "BatchKeep": {unsafe.Sizeof(batchKeep{}), 8},
	}
	at := uintptr(0)
	for line := range strings.SplitSeq(body[2], ";") {
		line = strings.TrimSpace(strings.NewReplacer("const ", "", "struct seq", "Seq", "uint64_t", "u64").Replace(line))
		if line == "" {
			continue
		}
		m := regexp.MustCompile(`(?s)^(long long|void|\w+)(.*)$`).FindStringSubmatch(line)
		for name := range strings.SplitSeq(m[2], ",") {
			layout, ok := types[m[1]]
			name = strings.TrimSpace(name)
			n := uintptr(1)
			if m := regexp.MustCompile(`^(\*? *\w+)\[(\w+)\]$`).FindStringSubmatch(name); m != nil {
				length, ok := map[string]int{"LINEAR_PARTS": mostParts, "CHAIN_BODY": chainBody, "COPIES_MOST": len(cuda.Copies{}.To), "2": 2, "3": 3, "8": 8}[m[2]]
				if !ok {
					t.Fatalf("%s: struct %s: what is %q?", file, name, m[2])
				}
				name, n = m[1], uintptr(length)
			}
			if strings.HasPrefix(name, "*") {
				layout, ok, name = [2]uintptr{8, 8}, true, strings.TrimSpace(name[1:])
			}
			if !ok || !regexp.MustCompile(`^\w+$`).MatchString(name) {
				t.Fatalf("%s: struct %s: what is %q of %q?", file, name, name, line)
			}
			at = (at + layout[1] - 1) &^ (layout[1] - 1)
			fields = append(fields, field{name, at, n * layout[0]})
			at += n * layout[0]
			align = max(align, layout[1])
		}
	}
	return fields, (at + align - 1) &^ (align - 1)
}

// source is a header of the kernels, its spaces and comments made the same.
func source(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile("../../kernels/" + file)
	if err != nil {
		t.Fatal(err)
	}
	s := regexp.MustCompile(`//[^\n]*`).ReplaceAllString(string(text), "")
	return strings.Join(strings.Fields(s), " ")
}

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
		"linked.cuh": {
			"((2 * block + part) * COMPUTERS + warp) * p.rows * (D + 2)",
			"sh.o = (float*)(memory + slots * S::SLOT); sh.m = (float4*)(sh.o + 2 * COMPUTERS * p.rows * S::WIDTH); sh.l = sh.m + 2 * ROWS;",
		},
		"layers.cuh": {
			"constexpr int CHAIN_WARPS = 8, CHAIN_ROWS = 4;",
			"constexpr int CHAIN_TILE = 16;",
			"constexpr int CHAIN_BOX = 4096;",
			"constexpr int CHAIN_GROUP = 8;",
			"constexpr int CHAIN_COLUMNS = 128;",
			"constexpr int CHAIN_FIXED = 14336;",
			"constexpr int CHAIN_FIXED_PAIRS = 21504;",
			"constexpr int CHAIN_STRIDE = 144;",
			"constexpr int CHAIN_BODY = 368;",
			"CHAIN_LINEAR = 0, CHAIN_ATTENTION = 1",
		},
		"chain.cuh": {
			"rings = memory + FIXED; area = rings + CHAIN_WARPS * p.stages * CHAIN_BOX; feeds = (ChainFeed*)(area + p.area); bars = (u64*)(feeds + p.feedCount); slots = bars + CHAIN_WARPS * p.stages;",
			"constexpr int COLUMNS = ROWS + (NORM ? 2 : 0);", "constexpr int GROUP = !NORM && SPLIT > 1 ? 1 : CHAIN_GROUP / COLUMNS;",
			"return SPLIT == 1 ? all : (all + 1 - rank) / 2;",
			"return unit < 0 ? unit + units() : unit;",
			"workers = o.workers >> half * 8 & 255",
			"float* const x = (float*)(room.area + o.place) + warp * most * (COLUMNS * CHAIN_STRIDE + (NORM ? CHAIN_COLUMNS : 0));",
		},
		"matrix.cuh": {
			"constexpr int MATRIX_WARPS = 8; constexpr int MATRIX_THREADS = (MATRIX_WARPS + 1) * 32;",
			"constexpr int MATRIX_TILE = 128;",
			"constexpr int MATRIX_STEP = 64;",
			"constexpr int MATRIX_WIDTH = MATRIX_TILE + 4;",
			"constexpr int PART = ROWS * 128; static constexpr int STAGE = MATRIX_TILE * 128 + 2 * PART;",
			"u64* bars = (u64*)(memory + p.stages * STAGE);",
		},
		"batch.cuh": {
			"constexpr int BATCH_TILE = 64; constexpr int BATCH_STAGE = 2 * BATCH_TILE * 128; constexpr int BATCH_STAGES = 10; constexpr int BATCH_PACE = 4; constexpr int BATCH_FIXED = 1024; constexpr int BATCH_WARPS = 8; constexpr int BATCH_THREADS = (BATCH_WARPS + 3) * 32;",
			"constexpr int BLOCK = 64; static constexpr int X = 2 * ROWS * 128; static constexpr int UNIT = 8 * ROWS; static constexpr int UNITS = BATCH_TILE / 8; static constexpr int PARTIALS = UNITS * UNIT;",
			"constexpr int MOST = 16; static constexpr int MOMENTS = MOST * 2 * ROWS;",
			"constexpr int LANES = BATCH_WARPS * 32 / ROWS;",
			"return most * (BLOCK / 4) <= FEW * LANES;",
			"b.ring = b.full + BATCH_FIXED; b.x = memory + BATCH_FIXED + p.stages * BATCH_STAGE; b.partials = (float*)(b.x + b.most * X); b.mine = b.partials + 2 * PARTIALS; b.moments = b.mine; b.affine = b.moments + MOMENTS;",
		},
		"matrix.cu": {
			"BATCH(batch_f16_8, Half, 8, 8, 2) BATCH(batch_f16_8_wide, Half, 8, 16, 1) BATCH(batch_f16_16, Half, 16, 8, 2) BATCH(batch_f16_16_wide, Half, 16, 16, 1)",
			"BATCH(batch_bf16_8, Brain, 8, 8, 2) BATCH(batch_bf16_8_wide, Brain, 8, 16, 1) BATCH(batch_bf16_16, Brain, 16, 8, 2) BATCH(batch_bf16_16_wide, Brain, 16, 16, 1)",
		},
		"types.cuh": {"F32 = 0, F16 = 1, BF16 = 2"},
		"prefill.cuh": {
			"constexpr int ROWS = GROUPS * 64; static constexpr int KEYS = 128;",
			"constexpr int QUERY = ROWS * D * 2; static constexpr int STAGE = KEYS * D * 2; static constexpr int THREADS = (GROUPS + 1) * 128;",
			"const int i = n * gridDim.x + (n & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);", // prefillPays
		},
		"prefill.cu": {"PREFILL(prefill_f16_64, Half, 64, 3, 4) PREFILL(prefill_f16_128, Half, 128, 2, 2) PREFILL(prefill_bf16_64, Brain, 64, 3, 4) PREFILL(prefill_bf16_128, Brain, 128, 2, 2)"},
		"copies.cu":  {"constexpr int COPIES_MOST = 8; constexpr int COPIES_THREADS = 256; constexpr int COPIES_BLOCK = 4096;"}, // putoff.go of package cuda
		"linear.cuh": {
			"constexpr int LINEAR_ROWS = 16, LINEAR_WARPS = 8, LINEAR_PARTS = 3;",
			"constexpr int LINEAR_TILE = 32;",
			"constexpr int WIDTH = LINEAR_TILE + 4;",
			"constexpr int PAD = 16;",
			"const int stride = (all + split - 1) / split * BLOCK + PAD;",
			"float* sums = x + p.rows * stride; float* parts = sums + LINEAR_WARPS * p.rows * WIDTH; float* moments = parts + 2 * p.rows * LINEAR_TILE; u32* tops = (u32*)(moments + 2 * LINEAR_WARPS * LINEAR_ROWS); float* affine = (float*)(tops + LINEAR_ROWS);",
		},
	} {
		text := source(t, file)
		for _, line := range lines {
			if !strings.Contains(text, line) {
				t.Errorf("%s has no %q any more: see shape.go", file, line)
			}
		}
	}
}

// The Go structs are those of the kernels, field by field.
func TestStructs(t *testing.T) {
	for _, c := range []struct {
		file, name string
		here       any
	}{
		{"work.cuh", "Seq", sequence{}},
		{"work.cuh", "Work", work{}},
		{"work.cuh", "Params", paramsBody{}},
		{"work.cuh", "MeetParams", meetParams{}},
		{"work.cuh", "LaunchParams", params{}},
		{"linked.cuh", "Links", links{}},
		{"layers.cuh", "ChainLinear", chainLinear{}},
		{"layers.cuh", "ChainAttention", chainAttention{}},
		{"layers.cuh", "ChainLayer", chainLayer{}},
		{"layers.cuh", "ChainFeed", chainFeed{}},
		{"layers.cuh", "ChainAffine", chainAffine{}},
		{"layers.cuh", "ChainParams", chainParams{}},
		{"layers.cuh", "ChainEnds", chainEnds{}},
		{"layers.cuh", "ChainLaunch", chainLaunch{}},
		{"append.cuh", "AppendParams", appendParams{}},
		{"unfused.cuh", "UnfusedParams", unfusedParams{}},
		{"prefill.cuh", "PrefillTile", prefillTile{}},
		{"prefill.cuh", "PrefillParams", prefillParams{}},
		{"linear.cuh", "LinearParams", linearParams{}},
		{"batch.cuh", "BatchParams", batchParams{}},
		{"batch.cuh", "BatchKeep", batchKeep{}},
		{"matrix.cuh", "OperandParams", operandParams{}},
		{"matrix.cuh", "MatrixParams", matrixParams{}},
		{"rows.cuh", "NormParams", normParams{}},
		{"rows.cuh", "GatherParams", gatherParams{}},
		{"sample.cuh", "SampleParams", sampleParams{}},
		{"sample.cuh", "SampleSetting", Setting{}},
		{"copies.cu", "Copies", cuda.Copies{}},
		{"../internal/cuda/fakedriver/testdata/driver.c", "copies", cuda.Copies{}},
		{"../internal/cuda/fakedriver/testdata/machine.c", "work", work{}}, // a driver that computes: the tag cuda
	} {
		fields, size := cStruct(t, c.file, c.name)
		here := reflect.TypeOf(c.here)
		if here.Size() != size {
			t.Errorf("%s has %d bytes, here %d", c.name, size, here.Size())
		}
		n := 0
		for i := range here.NumField() {
			f := here.Field(i)
			if f.Name == "_" {
				continue
			}
			if n >= len(fields) {
				t.Errorf("%s: has no %s", c.name, f.Name)
				continue
			}
			want := fields[n]
			want.name = regexp.MustCompile(`_\w`).ReplaceAllStringFunc(want.name, func(s string) string { return strings.ToUpper(s[1:]) })
			n++
			if f.Anonymous { // "p" in C
				f.Name = "p"
			}
			f.Name = strings.ToLower(f.Name[:1]) + f.Name[1:]
			if f.Name == "dtype" { // type is no name in Go
				f.Name = "type"
			}
			if f.Name != want.name || f.Offset != want.offset || f.Type.Size() != want.size {
				t.Errorf("%s: %+v, here %s at %d, %d bytes", c.name, want, f.Name, f.Offset, f.Type.Size())
			}
		}
		if n != len(fields) {
			t.Errorf("%s: %d fields, here %d", c.name, len(fields), n)
		}
	}
}
