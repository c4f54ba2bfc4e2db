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

// BenchmarkGPUMegakernel is the layers of a decode step of OPT, as launches and as a
// megakernel; of more rows than a megakernel takes, the linear layers and attention by themselves.
func BenchmarkGPUMegakernel(b *testing.B) {
	m, d := realDecoder(b)
	for _, s := range []struct {
		name                      string
		blocks, heads, dim, inner int
	}{{"125m", 12, 12, 64, 3072}, {"1.3b", 24, 32, 64, 8192}, {"6.7b", 32, 32, 128, 16384}} {
		for _, c := range []struct {
			rows, keys int
			behind     string
		}{{1, 1024, ""}, {1, 8192, "behind8192"}, {1, 32768, "behind32768"}, {2, 1024, ""}, {4, 1024, ""}, {8, 1024, ""}, {16, 1024, ""}, {32, 1024, ""}, {64, 1024, ""}, {128, 1024, ""}} {
			rows := c.rows
			sh := stackShape{rows: rows, blocks: s.blocks, heads: s.heads, kvHeads: s.heads, dim: s.dim, inner: s.inner, vocabulary: 50272, pageTokens: 64, kv: attn.Float16}
			for range rows {
				sh.keys = append(sh.keys, c.keys)
			}
			b.Run(fmt.Sprintf("%s/rows%d%s", s.name, rows, c.behind), func(b *testing.B) {
				if int64(rows)*int64(c.keys)*int64(s.blocks*s.heads*s.dim*4) > m.Dev.Info().MemoryBytes*2/3 {
					b.Skip("too many keys for the GPU's memory")
				}
				st := newStack(b, m, d, nil, sh)
				defer st.close(b)
				type way struct {
					name  string
					g     *cuda.Graph
					times []time.Duration
				}
				var ways []way
				add := func(name string, queue func() error) {
					g, err := m.Stream.Capture(queue)
					noError(b, err)
					ways = append(ways, way{name: name, g: g})
				}
				add("launches", st.launches)
				if rows <= d.megakernelRows(weight.Dense(sh.kv)) {
					c, megakernel := st.captured(b)
					defer c.Close()
					ways = append(ways, way{name: "megakernel", g: megakernel})
				} else {
					if rows <= mostSkinny {
						add("projected", func() error { return st.projected(b) })
					}
					add("linears", func() error { return st.launchesOf(true, false) })
					add("attention", func() error { return st.launchesOf(false, true) })
				}
				begin, err := m.Dev.NewEvent(true)
				noError(b, err)
				defer begin.Close()
				end, err := m.Dev.NewEvent(true)
				noError(b, err)
				defer end.Close()
				for range 40 { // in turn
					for i := range ways {
						noError(b, m.Stream.Record(begin))
						noError(b, m.Stream.Launch(ways[i].g))
						noError(b, m.Stream.Record(end))
						noError(b, m.Stream.Synchronize())
						took, err := end.Since(begin)
						noError(b, err)
						ways[i].times = append(ways[i].times, took)
					}
				}
				for _, way := range ways {
					slices.Sort(way.times)
					best, median := way.times[0], way.times[len(way.times)/2]
					b.ReportMetric(float64(best.Nanoseconds())/1e3, "us/"+way.name)
					b.ReportMetric(float64(median.Nanoseconds())/1e3, "us-median/"+way.name)
					b.ReportMetric(float64(st.bytes)/best.Seconds()/1e9, "GB/s/"+way.name)
				}
			})
		}
	}
}
