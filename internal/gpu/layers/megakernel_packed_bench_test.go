package layers

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/weight"
)

// BenchmarkGPUMegakernelPacked is a decode step of Llama-3-8B's shape and of OPT-6.7b's behind 1024 tokens, with weights of 16, 8 and 4
// bits, as launches and as a megakernel.
func BenchmarkGPUMegakernelPacked(b *testing.B) {
	m, d := realDecoder(b)
	for _, s := range []struct {
		name string
		sh   stackShape
		rows int // the most; shared memory has no space for two rows of all layers of OPT-6.7b
	}{
		{"llama8b", stackShape{blocks: 32, heads: 32, kvHeads: 8, dim: 128, inner: 14336, vocabulary: 128256, llama: true}, 2},
		{"opt6.7b", stackShape{blocks: 32, heads: 32, kvHeads: 32, dim: 128, inner: 16384, vocabulary: 50272}, 1},
	} {
		for _, w := range []struct {
			name string
			of   weight.Format
			head bool
		}{{"f16", 0, false}, {"int8", weight.Int8, true}, {"int4", weight.Int4_128, true}, {"int4-head16", weight.Int4_128, false}, {"q4_0", weight.Q4_0, true}, {"e4m3", weight.E4M3, true}} {
			for rows := 1; rows <= s.rows; rows++ {
				sh := s.sh
				sh.rows, sh.packed, sh.packedHead, sh.pageTokens, sh.kv = rows, w.of, w.head, 64, attn.Float16
				for range rows {
					sh.keys = append(sh.keys, 1024)
				}
				b.Run(fmt.Sprintf("%s/%s/rows%d", s.name, w.name, rows), func(b *testing.B) {
					st := newStack(b, m, d, nil, sh)
					defer st.close(b)
					launches, err := m.Stream.Capture(st.launches)
					noError(b, err)
					defer launches.Close()
					c, megakernel := st.captured(b)
					defer c.Close()
					defer megakernel.Close()
					begin, err := m.Dev.NewEvent(true)
					noError(b, err)
					defer begin.Close()
					end, err := m.Dev.NewEvent(true)
					noError(b, err)
					defer end.Close()
					var times [2][]time.Duration
					for range 30 { // in turn
						for i, g := range []*cuda.Graph{launches, megakernel} {
							noError(b, m.Stream.Record(begin))
							noError(b, m.Stream.Launch(g))
							noError(b, m.Stream.Record(end))
							noError(b, m.Stream.Synchronize())
							took, err := end.Since(begin)
							noError(b, err)
							times[i] = append(times[i], took)
						}
					}
					for i, name := range []string{"launches", "megakernel"} {
						slices.Sort(times[i])
						b.ReportMetric(float64(times[i][len(times[i])/2].Nanoseconds())/1e3, "us/"+name)
					}
					b.ReportMetric(float64(st.bytes)/1e6, "MB")
					b.ReportMetric(0, "ns/op")
				})
			}
		}
	}
}
