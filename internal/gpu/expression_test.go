//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package gpu_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/nvrtc"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/variant"
)

// at is a call of an expression.
type at struct {
	score                      float32
	query, key, head, sequence int32
}

// writtenParams is struct WrittenParams.
type writtenParams struct {
	_                    [2]uint64 // sums of measured weights, and their number
	tensors              [4]uint64
	lists, blocks, tiles uint64
	sizes                [16]int32
	numbers              [192]uint32
}

// bare is a unit whose kernels evaluate expressions: kernel bare_<i> that of program i, for a call in each thread.
func bare(programs []*variant.Program) (source string, printed []variant.Printed) {
	var b strings.Builder
	b.WriteString("#include \"attn_expression.cuh\"\nstruct At { float score; int query, key, head, sequence; };\nstruct Call { WrittenParams p; const At* at; float* out; };\n")
	for i, p := range programs {
		var loads []string
		for _, d := range p.Tensors {
			loads = append(loads, map[bool]string{true: "elementOf<int>", false: "Float32::load"}[d.Int])
		}
		one := p.CUDA(loads, "changes = false, windows = false")
		fmt.Fprintf(&b, "namespace e%d {\n%s}\nextern \"C\" __global__ void bare_%d(const __grid_constant__ Call c) {\n  const At at = c.at[threadIdx.x];\n"+
			"  using E = e%d::Expression;\n  c.out[threadIdx.x] = E::sees(c.p, at.score, at.query, at.key, at.head, at.sequence) ? E::score(c.p, at.score, at.query, at.key, at.head, at.sequence) : -LEAN_INF;\n}\n", i, one.Text, i, i)
		printed = append(printed, one)
	}
	return b.String(), printed
}

// testExpressions compares random expressions with float64, as a test of the CPU's interpreter does.
func testExpressions(t *testing.T, m *enginetest.Device, n int) {
	nvrtc.ForTest(t)
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	rng := reftest.Rand(t)
	var programs []*variant.Program
	for len(programs) < n {
		if p, err := variant.New(reftest.RandomVariant(rng, false, 1+rng.IntN(3))); err == nil { // others have too many operations
			programs = append(programs, p)
		}
	}
	source, printed := bare(programs)
	module, err := gpu.Compiled(m.Dev, source)
	enginetest.NoError(t, err)
	const threads = 32
	const u = 0x1p-24
	for i, p := range programs {
		f, err := module.Function(fmt.Sprintf("bare_%d", i))
		enginetest.NoError(t, err)
		tensors := reftest.RandomTensors(rng, p)
		params := writtenParams{}
		copy(params.numbers[:], printed[i].Numbers)
		var memory []gpu.Memory
		for k, x := range tensors {
			data := gpu.BytesOf(x.I32)
			if x.F64 != nil {
				data = gpu.BytesOf(reftest.Convert[float32](x.F64))
			}
			memory = append(memory, m.Put(t, data, attn.Float32))
			params.tensors[k] = memory[k].Address()
			for axis, size := range x.Shape {
				params.sizes[4*k+axis] = int32(size)
			}
		}
		calls := randomCalls(rng, threads)
		in, out := m.Put(t, gpu.BytesOf(calls), attn.Float32), gpu.Memory{DType: attn.Float32, Len: threads}
		m.Poison(t, &out)
		memory = append(memory, in, out)
		var args cuda.Args
		cuda.Struct(&args, &struct {
			writtenParams
			at, out uint64
		}{params, in.Address(), out.Address()})
		for _, x := range memory {
			args.Hold(x.Buffer)
		}
		enginetest.NoError(t, f.Launch(m.Stream, cuda.Grid{Blocks: [3]int{1}, Threads: [3]int{threads}}, &args))
		m.Settle(t)
		results := enginetest.Read(t, &out)
		for k, c := range calls {
			at := variant.At{Score: float64(c.score), Query: int(c.query), Key: int(c.key), Head: int(c.head), Sequence: int(c.sequence), Tensors: tensors}
			got := enginetest.Get(results, k, attn.Float32)
			values, errors, seen := reftest.VariantAt(p, &at, 0, u)
			if !seen {
				if !math.IsInf(got, -1) {
					t.Fatalf("%v at %+v: %v, want -Inf: the key is hidden", p, at, got)
				}
				continue
			}
			want, off := values[p.Score], errors[p.Score]
			if d := math.Abs(got - want); d > off+8*u*math.Abs(want)+1e-30 || got != got && want == want {
				t.Fatalf("%v at %+v: %v, want %v within %v\n%s", p, at, got, want, off, printed[i].Text)
			}
		}
		for _, x := range memory {
			enginetest.NoError(t, x.Buffer.Close())
		}
	}
}

func randomCalls(rng *rand.Rand, n int) []at {
	calls := make([]at, n)
	for i := range calls {
		calls[i] = at{float32(3 * rng.NormFloat64()), rng.Int32N(100), rng.Int32N(100), rng.Int32N(8), rng.Int32N(4)}
	}
	return calls
}

func TestEmulatedExpressions(t *testing.T) {
	testExpressions(t, enginetest.Emulated(t, 1, 1), reftest.Cases(t, 40, 500))
}

func TestGPUExpressions(t *testing.T) {
	testExpressions(t, enginetest.Real(t), reftest.Cases(t, 500, 500))
}
