//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"math"
	"strings"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/testgpu"
	"gorgonia.org/leanattention/internal/lean"
)

// unfused does what the three launches do, each of all rows.
func (k *twin) unfused(l *testgpu.Launch) {
	u := (*unfusedParams)(unsafe.Pointer(&l.Arg[0]))
	name := strings.Split(l.Kernel, "_")
	kv := testgpu.TypeOf(u.kind)
	if len(name) == 3 && gpu.Name(kv) != name[2] {
		k.t.Errorf("%s of %v", l.Kernel, kv)
	}
	if l.Blocks != unfusedBlocks*k.e.blocks || l.Threads != unfusedThreads {
		k.t.Errorf("%s: %d blocks of %d threads", l.Kernel, l.Blocks, l.Threads)
	}
	heads, dim, first := int(u.heads*u.group), int(u.dim), 0
	row, other := make([]float64, dim), make([]float64, dim)
	for i := 0; ; i++ {
		s := testgpu.At[sequence](u.seqs, i)
		if s.queries == 0 {
			break
		}
		keys := int(s.keys)
		for n := range int(s.queries) * heads {
			q, head := n/heads, n%heads
			sees := keys
			if u.Causal != 0 {
				sees = keys - int(s.queries) + q + 1
			}
			scores := first + n*keys
			token, out := int(s.row)+q, make([]float64, dim)
			switch name[1] {
			case "scores":
				testgpu.LoadRow(row, u.query, token*int(u.queryRow)+head*int(u.queryHead), testgpu.TypeOf(u.queryType))
				for j := range sees {
					testgpu.LoadRow(other, u.keys, u.key(s, head, j), kv)
					var x float64
					for c := range dim {
						x += row[c] * other[c]
					}
					testgpu.Store(u.scores, scores+j, attn.Float32, x*float64(u.scale))
				}
			case "softmax":
				top, sum := math.Inf(-1), 0.0
				for j := range sees {
					top = max(top, testgpu.Load(u.scores, scores+j, attn.Float32))
				}
				for j := range sees {
					sum += lean.Exp4(testgpu.Load(u.scores, scores+j, attn.Float32) - top)
				}
				for j := range sees {
					testgpu.Store(u.scores, scores+j, attn.Float32, lean.Exp4(testgpu.Load(u.scores, scores+j, attn.Float32)-top)/sum)
				}
				if u.lse != 0 && sees > 0 {
					testgpu.Store(u.lse, token*int(u.lseRow)+head*int(u.lseHead), attn.Float32, top*lean.Ln4+math.Log(sum))
				}
			case "sum":
				for j := range sees {
					w := testgpu.Load(u.scores, scores+j, attn.Float32)
					testgpu.LoadRow(other, u.values, u.key(s, head, j), kv)
					for c, x := range other {
						out[c] += w * x
					}
				}
				for c, x := range out {
					if sees > 0 {
						testgpu.Store(u.out, token*int(u.outRow)+head*int(u.outHead)+c, testgpu.TypeOf(u.outType), x)
					}
				}
			}
		}
		first += int(s.queries) * heads * keys
	}
	if name[1] == "sum" {
		a := attention{twin: k, params: &params{Params: u.Params}, dim: dim, grid: 1}
		a.writeMasked(0)
	}
}

// key is where key j is, in elements.
func (u *unfusedParams) key(s *sequence, head, j int) int {
	row := int(s.pages)*int(u.pageRows) + j
	if u.pages != 0 {
		row = int(*testgpu.At[int32](u.pages, int(s.pages)+j/int(u.pageTokens)))*int(u.pageRows) + j%int(u.pageTokens)
	}
	return (row + head/int(u.group)*int(u.headRows)) * int(u.dim)
}
