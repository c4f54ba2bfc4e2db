package layers

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

// sampleReference says what Setting says, in float64 and by sorting: the token,
// and how far the nearest decision on the way to it was from the other outcome,
// as a part of all probability.
func sampleReference(logits []float32, s Setting, u float64) (id int32, slack float64) {
	kept, p, slack := sampleKept(logits, s)
	if len(kept) == 0 {
		return -1, slack
	}
	sum := 0.0
	id = kept[0]
	for i, k := range kept {
		if p[i] == 0 {
			continue
		}
		id = k
		sum += p[i]
		slack = min(slack, math.Abs(sum-u))
		if sum > u {
			break
		}
	}
	return id, slack
}

// sampleKept is the tokens that can be chosen, by id, and their probabilities.
func sampleKept(logits []float32, s Setting) (kept []int32, p []float64, slack float64) {
	slack = 1
	top := float32(math.Inf(-1))
	for _, x := range logits {
		if !(x <= math.MaxFloat32) {
			return nil, nil, slack
		}
		top = max(top, x)
	}
	if !(s.Temperature >= 0) || math.IsInf(float64(top), -1) {
		return nil, nil, slack
	}
	if s.Temperature == 0 {
		return []int32{int32(slices.Index(logits, top))}, []float64{1}, slack
	}
	for i := range logits {
		kept = append(kept, int32(i))
	}
	slices.SortStableFunc(kept, func(i, j int32) int { return cmp.Compare(logits[j]+0, logits[i]+0) })
	weight := func(i int32) float64 { return math.Exp((float64(logits[i]) - float64(top)) / s.Temperature) }
	if k := int(s.TopK); k > 0 && k < len(kept) {
		kept = kept[:k]
	}
	if s.TopP < 1 {
		total, sum, n := 0.0, 0.0, 0
		for _, i := range kept {
			total += weight(i)
		}
		for n < len(kept) && (n == 0 || sum < s.TopP*total) {
			sum += weight(kept[n])
			n++
			slack = min(slack, math.Abs(sum-s.TopP*total)/total)
		}
		kept = kept[:n]
	}
	slices.Sort(kept)
	total := 0.0
	for _, i := range kept {
		total += weight(i)
	}
	for _, i := range kept {
		p = append(p, weight(i)/total)
	}
	return kept, p, slack
}

// rounding is a slack within which weights that are right to 1e-9 may decide
// otherwise.
const rounding = 3e-9

// samples is a problem in the memory of a machine. Between the rows of logits,
// and where no setting says that they are read, there is NaN.
type samples struct {
	Samples
	logits   [][]float32
	settings []Setting // nil: all greedy
	random   []float64
}

// guard is bytes before and behind the ids.
const guard = 48

// newSamples brings rows to a machine, gap elements between them.
func (m *machine) newSamples(t testing.TB, logits [][]float32, settings []Setting, random []float64, gap int) *samples {
	t.Helper()
	s := &samples{logits: logits, settings: settings, random: random}
	s.Rows, s.Vocab = len(logits), len(logits[0])
	s.Stride = s.Vocab + gap
	s.Logits = m.Put(t, s.logitBytes(), attn.Float32)
	raw := func(b []byte, offset int64) gpu.Bytes {
		x := m.Put(t, b, attn.Float32)
		return gpu.Bytes{Buffer: x.Buffer, Offset: x.Offset + offset}
	}
	s.IDs = raw(bytes.Repeat([]byte{0xaa}, 4*s.Rows+2*guard), guard)
	if settings != nil {
		s.Settings = raw(SettingBytes(settings), 0)
		s.Random = raw(gpu.BytesOf(random), 0)
	}
	return s
}

// logitBytes is the logits as they lie in memory. It ends with the last row.
func (s *samples) logitBytes() []byte {
	b := enginetest.Poisoned((s.Rows-1)*s.Stride+s.Vocab, attn.Float32)
	for i, row := range s.logits {
		copy(b[i*s.Stride*4:], gpu.BytesOf(row))
	}
	return b
}

// ids reads them, and looks after the guards.
func (s *samples) ids(t testing.TB) []int32 {
	t.Helper()
	b := make([]byte, 4*s.Rows+2*guard)
	noError(t, s.IDs.Buffer.Download(b, s.IDs.Offset-guard))
	poison := bytes.Repeat([]byte{0xaa}, guard)
	if !bytes.Equal(b[:guard], poison) || !bytes.Equal(b[len(b)-guard:], poison) {
		t.Fatal("bytes beside the ids were written")
	}
	ids := make([]int32, s.Rows)
	for i := range ids {
		ids[i] = int32(binary.LittleEndian.Uint32(b[guard+4*i:]))
	}
	return ids
}

// check compares ids with the reference.
func (s *samples) check(t testing.TB, ids []int32) {
	t.Helper()
	for i, got := range ids {
		set, u := Setting{}, 0.0
		if s.settings != nil {
			set, u = s.settings[i], s.random[i]
		}
		if want, slack := sampleReference(s.logits[i], set, u); got != want && slack > rounding {
			t.Fatalf("row %d of %d, vocabulary %d, stride %d, %+v, u %v: token %d, want %d (by %g)", i, s.Rows, s.Vocab, s.Stride, set, u, got, want, slack)
		}
	}
}

func (s *samples) close(t testing.TB) {
	t.Helper()
	noError(t, s.Logits.Buffer.Close())
	for _, b := range []gpu.Bytes{s.IDs, s.Settings, s.Random} {
		if b.Buffer != nil {
			noError(t, b.Buffer.Close())
		}
	}
}

// sampleRows runs a problem once.
func (m *machine) sampleRows(t testing.TB, logits [][]float32, settings []Setting, random []float64, gap int) []int32 {
	t.Helper()
	sampler, err := NewSampler(m.Dev)
	noError(t, err)
	s := m.newSamples(t, logits, settings, random, gap)
	noError(t, sampler.Run(m.Stream, &s.Samples))
	m.Settle(t)
	ids := s.ids(t)
	s.check(t, ids)
	s.close(t)
	return ids
}

var inf = float32(math.Inf(1))

// sampleLogits draws a row of some kind.
func sampleLogits(rng *rand.Rand, vocab int) []float32 {
	x := make([]float32, vocab)
	kind := rng.IntN(10)
	for i := range x {
		switch kind {
		default:
			x[i] = float32(rng.NormFloat64() * 3)
		case 1: // many are equal, and zeros of both signs are
			x[i] = [...]float32{-1, 0, float32(math.Copysign(0, -1)), 0.5}[rng.IntN(4)]
		case 2: // all are equal
			x[i] = -7
		case 3:
			x[i] = -inf
			if rng.IntN(5) == 0 {
				x[i] = float32(rng.NormFloat64())
			}
		case 4: // denormals
			x[i] = math.Float32frombits(uint32(rng.IntN(200)) | uint32(rng.IntN(2))<<31)
		case 5: // up to the greatest
			x[i] = min(max(float32(rng.NormFloat64()*1e38), -math.MaxFloat32), math.MaxFloat32)
		case 6: // steps, as of 16-bit numbers
			x[i] = float32(rng.IntN(100)) / 8
		}
	}
	if kind == 7 {
		for range 1 + rng.IntN(3) {
			x[rng.IntN(vocab)] = [...]float32{inf, -inf, float32(math.NaN()), -float32(math.NaN()), math.Float32frombits(0xff800001)}[rng.IntN(5)]
		}
	}
	if kind == 8 && rng.IntN(3) == 0 {
		for i := range x {
			x[i] = -inf
		}
	}
	return x
}

func sampleSetting(rng *rand.Rand, vocab int) Setting {
	return Setting{
		Temperature: enginetest.Pick(rng, 0, 0.3, 0.7, 1, 1, 1.5, 40, 1e-310, math.MaxFloat64, -1, math.NaN()),
		TopK:        int32(enginetest.Pick(rng, 0, 0, 1, 2, 5, 50, 64, 65, rng.IntN(vocab)+1, vocab-1, vocab, vocab+1, math.MaxInt32)),
		TopP:        enginetest.Pick(rng, 1, 1, 0.9, 0.95, 0.5, 0.1, 1e-12, 0.99999, rng.Float64()),
	}
}

// testSample runs random rows with random settings.
func testSample(t *testing.T, m *machine, n, longest int) {
	rng := reftest.Rand(t)
	for range n {
		vocab := enginetest.Pick(rng, 1, 2, 3, 4, 5, 31, 33, 127, 1000, 4097, 1+rng.IntN(longest), longest)
		rows := enginetest.Pick(rng, 1, 1, 2, 3, 16, 33)
		if rows*vocab > 10*longest {
			rows = 1
		}
		logits, settings, random := make([][]float32, rows), make([]Setting, rows), make([]float64, rows)
		for i := range rows {
			logits[i], settings[i] = sampleLogits(rng, vocab), sampleSetting(rng, vocab)
			random[i] = enginetest.Pick(rng, rng.Float64(), rng.Float64(), rng.Float64(), 0, 1-0x1p-53)
		}
		if rng.IntN(4) == 0 {
			settings, random = nil, nil
		}
		m.sampleRows(t, logits, settings, random, rng.IntN(8))
	}
}

// testSampleGreedy puts what is hard for a maximum at every place where the work
// is cut.
func testSampleGreedy(t *testing.T, m *machine, cases int, vocabs ...int) {
	rng := reftest.Rand(t)
	gaps := []int{0, 1, 2, 3, 4, 61}
	rng.Shuffle(len(gaps), func(i, j int) { gaps[i], gaps[j] = gaps[j], gaps[i] })
	for _, vocab := range vocabs {
		rows := 40
		for _, gap := range gaps[:cases] {
			logits := make([][]float32, rows)
			for i := range logits {
				x := sampleLogits(rng, vocab)
				a, b := rng.IntN(vocab), rng.IntN(vocab)
				if i < 8 { // ends and beginnings
					a, b = min(i/2, vocab-1), max(vocab-1-i/2, 0)
				}
				switch i % 5 {
				case 0: // the greatest twice
					x[a], x[b] = math.MaxFloat32, math.MaxFloat32
				case 1: // the only one
					for j := range x {
						x[j] = -inf
					}
					x[a] = -math.MaxFloat32
				case 2:
					x[b] = float32(math.NaN())
				case 3:
					x[b] = inf
				}
				logits[i] = x
			}
			m.sampleRows(t, logits, nil, nil, gap)
			settings := make([]Setting, rows)
			for i := range settings {
				settings[i].Temperature = float64(-(i % 7 / 6)) // rows of nobody among greedy ones
			}
			m.sampleRows(t, logits, settings, make([]float64, rows), gap)
		}
	}
}

// testSampleSets finds the whole distribution of a row: a token is chosen by
// numbers just inside its interval of the inverse CDF, and not by those just
// outside it.
func testSampleSets(t *testing.T, m *machine, n, vocab int) {
	rng := reftest.Rand(t)
	const edge = rounding
	for range n {
		logits := sampleLogits(rng, 1+rng.IntN(vocab))
		set := sampleSetting(rng, len(logits))
		kept, p, slack := sampleKept(logits, set)
		if slack < rounding || len(kept) == 0 {
			continue
		}
		var random []float64
		var want []int32
		sum := 0.0
		for i, id := range kept {
			if p[i] > 4*edge {
				random = append(random, sum+edge, sum+p[i]-edge)
				want = append(want, id, id)
			}
			sum += p[i]
		}
		const most = 600 // rows
		for len(random) > 0 {
			k := min(len(random), most)
			rows, settings := make([][]float32, k), make([]Setting, k)
			for i := range k {
				rows[i], settings[i] = logits, set
			}
			s := m.newSamples(t, rows, settings, random[:k], 0)
			sampler, err := NewSampler(m.Dev)
			noError(t, err)
			noError(t, sampler.Run(m.Stream, &s.Samples))
			m.Settle(t)
			for i, got := range s.ids(t) {
				if got != want[i] {
					t.Fatalf("vocabulary %d, %+v, u %v: token %d, want %d of %d", len(logits), set, random[i], got, want[i], len(kept))
				}
			}
			s.close(t)
			random, want = random[k:], want[k:]
			if k == most && rng.IntN(4) > 0 {
				break // of a long row some are enough
			}
		}
	}
}

// testSampleRepeats: the same tokens at every run, where the distribution is so
// flat that the last bits of a sum choose another.
func testSampleRepeats(t *testing.T, m *machine, n, rows, vocab int) {
	rng := reftest.Rand(t)
	logits, settings, random := make([][]float32, rows), make([]Setting, rows), make([]float64, rows)
	for i := range rows {
		logits[i] = make([]float32, vocab)
		for j := range logits[i] {
			logits[i][j] = float32(rng.NormFloat64() / 100)
		}
		settings[i] = Setting{Temperature: 1 + rng.Float64(), TopP: enginetest.Pick(rng, 1, 0.9, 0.5), TopK: int32(enginetest.Pick(rng, 0, vocab/2))}
		random[i] = rng.Float64()
	}
	sampler, err := NewSampler(m.Dev)
	noError(t, err)
	s := m.newSamples(t, logits, settings, random, 1)
	var first []int32
	for i := range n {
		noError(t, s.IDs.Buffer.Set(s.IDs.Offset, 0xaa, int64(4*rows)))
		noError(t, sampler.Run(m.Stream, &s.Samples))
		m.Settle(t)
		if ids := s.ids(t); i == 0 {
			first = ids
			s.check(t, ids)
		} else if !slices.Equal(ids, first) {
			t.Fatalf("run %d: %v, at first %v", i, ids, first)
		}
	}
	s.close(t)
}

// testSampleGraph: what was captured reads logits, settings and random numbers
// anew at each launch.
func testSampleGraph(t *testing.T, m *machine, n, vocab int) {
	rng := reftest.Rand(t)
	const rows = 5
	sampler, err := NewSampler(m.Dev)
	noError(t, err)
	draw := func(i int, s *samples) {
		s.logits[i], s.settings[i], s.random[i] = sampleLogits(rng, vocab), sampleSetting(rng, vocab), rng.Float64()
	}
	first := samples{logits: make([][]float32, rows), settings: make([]Setting, rows), random: make([]float64, rows)}
	for i := range rows {
		draw(i, &first)
	}
	s := m.newSamples(t, first.logits, first.settings, first.random, 3)
	greedy := m.newSamples(t, first.logits, nil, nil, 3)
	launch := m.Capture(t, func() error {
		if err := sampler.Run(m.Stream, &s.Samples); err != nil {
			return err
		}
		return sampler.Run(m.Stream, &greedy.Samples)
	})
	for range n {
		for i := range rows {
			draw(i, s)
		}
		greedy.logits = s.logits
		noError(t, s.Logits.Buffer.Upload(s.Logits.Offset, s.logitBytes()))
		noError(t, greedy.Logits.Buffer.Upload(greedy.Logits.Offset, s.logitBytes()))
		noError(t, s.Settings.Buffer.Upload(s.Settings.Offset, SettingBytes(s.settings)))
		noError(t, s.Random.Buffer.Upload(s.Random.Offset, gpu.BytesOf(s.random)))
		noError(t, launch())
		m.Settle(t)
		s.check(t, s.ids(t))
		greedy.check(t, greedy.ids(t))
	}
	s.close(t)
	greedy.close(t)
}

// testSampleChain: launches overlap, and each sees what the ones before have
// written. The ids of one are the logits of the next: as floats they are
// denormals in the same order.
func testSampleChain(t *testing.T, m *machine, n, rows, vocab int) {
	rng := reftest.Rand(t)
	sampler, err := NewSampler(m.Dev)
	noError(t, err)
	var first [2]*samples // by turns, with different ids
	var want [2]int32
	ids := m.Put(t, enginetest.Poisoned(rows, attn.Float32), attn.Float32)
	for i := range first {
		logits, settings, random := make([][]float32, rows), make([]Setting, rows), make([]float64, rows)
		for j := range logits {
			logits[j] = make([]float32, vocab)
			for k := range logits[j] {
				logits[j][k] = float32(rng.NormFloat64())
			}
			settings[j] = Setting{Temperature: 1, TopP: 0.9, TopK: int32(vocab / 2)}
			random[j] = rng.Float64()
		}
		s := m.newSamples(t, logits, settings, random, 0)
		noError(t, sampler.Run(m.Stream, &s.Samples))
		m.Settle(t)
		got := s.ids(t)
		s.check(t, got)
		want[i] = int32(slices.Index(got, slices.Max(got)))
		noError(t, s.IDs.Buffer.Close())
		s.IDs = gpu.Bytes{Buffer: ids.Buffer, Offset: ids.Offset}
		first[i] = s
	}
	last := m.Put(t, enginetest.Poisoned(4*n, attn.Float32), attn.Float32) // an id in 16 bytes
	for i := range n {
		noError(t, sampler.Run(m.Stream, &first[i%2].Samples))
		noError(t, sampler.Run(m.Stream, &Samples{Logits: ids, Rows: 1, Vocab: rows, Stride: rows, IDs: gpu.Bytes{Buffer: last.Buffer, Offset: last.Offset + 16*int64(i)}}))
	}
	m.Settle(t)
	got := enginetest.Read(t, &last)
	for i := range n {
		if id := int32(binary.LittleEndian.Uint32(got[16*i:])); id != want[i%2] {
			t.Errorf("launch %d: %d, want %d", i, id, want[i%2])
		}
	}
	for _, b := range []gpu.Bytes{{Buffer: ids.Buffer}, {Buffer: last.Buffer}, first[0].Settings, first[0].Random, first[1].Settings, first[1].Random} {
		noError(t, b.Buffer.Close())
	}
	for _, s := range first {
		noError(t, s.Logits.Buffer.Close())
	}
}

func benchmarkSample(b *testing.B, m *machine) {
	rng := reftest.Rand(b)
	const vocab, launches = 50272, 50
	sampler, err := NewSampler(m.Dev)
	noError(b, err)
	for _, rows := range []int{1, 16, 64} {
		for _, c := range []struct {
			name    string
			setting *Setting
		}{
			{"greedy", nil},
			{"k50_p0.9", &Setting{Temperature: 1, TopK: 50, TopP: 0.9}},
			{"p0.9", &Setting{Temperature: 1, TopP: 0.9}},
			{"all", &Setting{Temperature: 1, TopP: 1}},
		} {
			b.Run(fmt.Sprintf("rows%d_%s", rows, c.name), func(b *testing.B) {
				logits, random := make([][]float32, rows), make([]float64, rows)
				for i := range logits {
					logits[i] = make([]float32, vocab)
					for j := range logits[i] {
						logits[i][j] = float32(rng.NormFloat64() * 3)
					}
					random[i] = rng.Float64()
				}
				var settings []Setting
				if c.setting != nil {
					settings = slices.Repeat([]Setting{*c.setting}, rows)
				}
				s := m.newSamples(b, logits, settings, random, 0)
				// A graph, as decoding has it: the host is slower than a launch.
				graph, err := m.Stream.Capture(func() error {
					for range launches {
						if err := sampler.Run(m.Stream, &s.Samples); err != nil {
							return err
						}
					}
					return nil
				})
				noError(b, err)
				noError(b, m.Stream.Launch(graph))
				noError(b, m.Stream.Synchronize())
				b.SetBytes(int64(launches * rows * vocab * 4))
				for b.Loop() {
					noError(b, m.Stream.Launch(graph))
					noError(b, m.Stream.Synchronize())
				}
				b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(launches*b.N), "us/launch")
				noError(b, graph.Close())
				s.close(b)
			})
		}
	}
}
