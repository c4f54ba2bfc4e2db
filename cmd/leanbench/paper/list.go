package paper

import (
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/leanattention/cmd/leanbench/e2e"
)

// A figure of the paper has panels, each with shapes along an axis.

// kind is how a panel is measured.
type kind int

const (
	speed  kind = iota // attention of a decode step, against other programs and other schedules
	use                // the same, and how busy multiprocessors are
	energy             // what it draws
	scale              // heads on several GPUs
	whole              // a prompt and its tokens, of a whole decoder
)

// panel is a table of the report.
type panel struct {
	id, table string // the table's name begins with "Figure"
	what      string
	kind      kind
	gpu, cpu  []point // none: it makes no sense there
}

// point is a shape.
type point struct {
	label               string // its case in the report
	model               string // of a whole decoder
	heads, kvHeads, dim int
	lengths             []int
	quick               bool // it is part of a quick measurement
}

func (p point) even() bool { return slices.Max(p.lengths) == slices.Min(p.lengths) }

// elements is how many numbers the keys and values are.
func (p point) elements() (n int64) {
	for _, l := range p.lengths {
		n += int64(l)
	}
	return 2 * n * int64(p.kvHeads*p.dim)
}

// at is a batch of one length.
func at(batch, heads, kvHeads, keys, dim int) point {
	p := point{heads: heads, kvHeads: kvHeads, dim: dim, lengths: slices.Repeat([]int{keys}, batch)}
	of := fmt.Sprint(heads)
	if heads != kvHeads {
		of += fmt.Sprintf("/%d", kvHeads)
	}
	p.label = fmt.Sprintf("b%d, %s heads x %d x %d", batch, of, keys, dim)
	return p
}

// along makes a point of each number. Every other one, and the last, is part of a quick measurement.
func along(numbers []int, make func(n int) point) (all []point) {
	for i, n := range numbers {
		p := make(n)
		p.quick = (len(numbers)-1-i)%3 == 0
		all = append(all, p)
	}
	return all
}

// ladder is from, from*by, ... up to to.
func ladder(from, to, by int) (all []int) {
	for n := from; n <= to; n *= by {
		all = append(all, n)
	}
	return all
}

// panels are all that there are, in the order of the paper but for what takes longest. It is a variable for
// tests, which have other shapes.
var panels = func() []panel {
	contexts := func(batch, heads, from, to int) []point {
		return along(ladder(from, to, 4), func(n int) point { return at(batch, heads, heads, n, 64) })
	}
	heads := func(batch, keys int, numbers ...int) []point {
		return along(numbers, func(n int) point { return at(batch, n, n, keys, 64) })
	}
	batches := func(heads, keys int, numbers ...int) []point {
		return along(numbers, func(n int) point { return at(n, heads, heads, keys, 64) })
	}
	return []panel{
		{
			id: "3", table: "Figure 3", what: "how busy the multiprocessors are", kind: use,
			gpu: contexts(1, 56, 1<<10, 1<<18),
		},
		{
			id: "7a", table: "Figure 7a", what: "contexts",
			gpu: contexts(4, 32, 1<<10, 1<<18), cpu: contexts(4, 32, 1<<8, 1<<14),
		},
		{
			id: "7b", table: "Figure 7b", what: "heads",
			gpu: heads(4, 1<<18, 8, 16, 24, 32, 48, 56, 64), cpu: heads(1, 1<<14, 1, 2, 3, 5, 8, 16, 32),
		},
		{
			id: "7c", table: "Figure 7c", what: "sequences",
			gpu: batches(32, 1<<16, 1, 2, 4, 8, 16, 32), cpu: batches(12, 1<<12, 1, 2, 4, 8, 16),
		},
		{
			id: "8a", table: "Figure 8a", what: "contexts",
			gpu: contexts(6, 48, 1<<10, 1<<18),
		},
		{
			id: "8b", table: "Figure 8b", what: "heads",
			gpu: heads(6, 1<<16, 8, 16, 24, 32, 40, 48, 56, 64),
		},
		{
			id: "8c", table: "Figure 8c", what: "sequences",
			gpu: batches(48, 1<<16, 1, 2, 4, 6, 8, 16),
		},
		{
			id: "peaks", table: "Figures 7 and 8, where the paper gains most", what: "shapes of the paper's largest speed-ups",
			gpu: peaks(),
		},
		{
			id: "10", table: "Figure 10", what: "contexts of several lengths",
			gpu: ragged(32, 64, 1<<16, 4, 8, 16), cpu: ragged(12, 64, 1<<13, 4, 8),
		},
		{
			id: "10suites", table: "Figure 10, suites of other projects", what: "contexts of several lengths, of other projects",
			gpu: suites(), cpu: suites()[2:5],
		},
		{
			id: "11", table: "Figure 11", what: "heads of 128",
			gpu: models(ladder(1<<13, 1<<17, 4), 1, 8), cpu: models([]int{1 << 11, 1 << 13}, 1),
		},
		{
			id: "13", table: "Figure 13", what: "energy", kind: energy,
			gpu: slices.Concat(
				along(ladder(1<<15, 1<<19, 2), func(n int) point { return at(1, 56, 56, n, 64) }),
				along([]int{1 << 14, 1 << 16}, func(n int) point { return at(6, 48, 48, n, 64) })),
		},
		{
			id: "13other", table: "Figure 13, other shapes", what: "energy of groups of query heads, heads of 128 and several lengths", kind: energy,
			gpu: others(),
		},
		{
			id: "9", table: "Figure 9", what: "several GPUs", kind: scale,
			gpu: slices.Concat(
				along(ladder(1<<10, 1<<16, 4), func(n int) point { return at(4, 256, 256, n, 64) }),
				along([]int{64, 128, 160}, func(n int) point { return at(4, n, n, 1<<16, 64) })),
		},
		{
			id: "12", table: "Figure 12", what: "end to end, OPT-6.7b's shape", kind: whole,
			gpu: wholes(e2e.WholeOPT, 32, 32, 1<<15),
		},
		{
			id: "12phi", table: "Figure 12, Phi-3-medium", what: "end to end, " + e2e.WholePhi, kind: whole,
			gpu: wholes(e2e.WholePhi, 40, 10, 1<<15),
		},
	}
}

// peaks are the shapes of the extremes that section VI-A names.
func peaks() (all []point) {
	for i, p := range []point{at(2, 56, 56, 1<<18, 64), at(8, 12, 12, 1<<19, 64), at(6, 48, 48, 1<<16, 64), at(4, 56, 56, 1<<17, 64)} {
		p.quick = i%2 == 0
		all = append(all, p)
	}
	return all
}

// others are shapes of the gpu command that are none of the paper's: models of today, and a batch of several lengths.
func others() []point {
	one := point{
		label: "131072 and 31 x 1024, 32/8 heads of 128", heads: 32, kvHeads: 8, dim: 128,
		lengths: append([]int{131072}, slices.Repeat([]int{1024}, 31)...),
	}
	all := []point{at(16, 32, 8, 8192, 128), at(64, 64, 8, 4096, 128), at(1, 32, 8, 131072, 128), one}
	all[0].quick = true
	return all
}

// ragged are batches with one context of the largest length, where the average is a share of it
// and the others are equal.
func ragged(heads, dim, most int, batches ...int) (all []point) {
	for i, batch := range batches {
		for _, percent := range []int{20, 40, 60, 80, 100} {
			other := (batch*most*percent/100 - most) / (batch - 1)
			if other < 1 {
				continue // one context alone is more than that
			}
			lengths := append([]int{most}, slices.Repeat([]int{other}, batch-1)...)
			all = append(all, point{
				label: fmt.Sprintf("%d sequences, %d%% of %d, %d heads of %d", batch, percent, most, heads, dim),
				heads: heads, kvHeads: heads, dim: dim, lengths: lengths, quick: i == 1 && percent%40 == 0,
			})
		}
	}
	return all
}

// suites are the ragged batches that Tencent's hpc-ops measures its dynamic schedule with, and
// those of FlashInfer's paper (arXiv:2501.01005, section 4.2).
func suites() (all []point) {
	add := func(name string, heads, kvHeads int, quick bool, parts ...int) {
		var lengths []int
		for i := 0; i < len(parts); i += 2 {
			lengths = append(lengths, slices.Repeat([]int{parts[i+1]}, parts[i])...)
		}
		all = append(all, point{label: fmt.Sprintf("%s, %d/%d heads of 128", name, heads, kvHeads), heads: heads, kvHeads: kvHeads, dim: 128, lengths: lengths, quick: quick})
	}
	add("64 x 512", 8, 1, false, 64, 512)
	add("64 x 4096", 8, 1, false, 64, 4096)
	add("32 x 128 and 32 x 4096", 8, 1, false, 32, 128, 32, 4096)
	add("16384 and 15 x 64", 8, 1, true, 1, 16384, 15, 64)
	add("65536 and 7 x 4096", 8, 1, false, 1, 65536, 7, 4096)
	add("65536 and 15 x 4096", 8, 1, false, 1, 65536, 15, 4096)
	add("65536 and 31 x 4096", 8, 1, true, 1, 65536, 31, 4096)
	add("131072 and 31 x 4096", 8, 1, false, 1, 131072, 31, 4096)
	add("2 x 32768 and 30 x 4096", 8, 1, false, 2, 32768, 30, 4096)
	// What is drawn at random there is fixed here: the quantiles of the distribution.
	uniform, zipf := []int{}, []int{}
	for i := range 16 {
		uniform = append(uniform, 1, 512+512*i/15)
		zipf = append(zipf, 1, 4846/(i+1)) // 1024 on average
	}
	add("16 x 512 to 1024", 32, 8, false, uniform...)
	add("16 by Zipf's law, 1024 on average", 32, 8, true, zipf...)
	return all
}

// models are decode steps of three models' attention.
func models(contexts []int, batches ...int) (all []point) {
	for _, m := range []struct {
		name           string
		heads, kvHeads int
	}{{"Llama-2-7B", 32, 32}, {"Mistral-7B", 32, 8}, {"Phi-3-medium", 40, 10}} {
		for _, batch := range batches {
			all = append(all, along(contexts, func(n int) point {
				p := at(batch, m.heads, m.kvHeads, n, 128)
				p.label = m.name + ", " + p.label
				return p
			})...)
		}
	}
	return all
}

// wholes are prompts of a decoder, with an eighth as many tokens behind them. None is quick: the weights
// alone take longer.
func wholes(model string, heads, kvHeads, most int) (all []point) {
	for _, n := range ladder(1<<10, most, 2) {
		all = append(all, point{label: fmt.Sprintf("%s, %d tokens and %d", model, n, n/8), model: model, heads: heads, kvHeads: kvHeads, dim: 128, lengths: []int{n}})
	}
	return all
}

// chosen are the panels that arguments name, in their order: all of a figure by its number, or one panel.
func chosen(names []string) (picked []panel, err error) {
	all := panels()
	if len(names) == 0 {
		return all, nil
	}
	taken := make(map[string]bool)
	for _, name := range names {
		found := false
		for _, p := range all {
			if name == "" || p.id != name && strings.TrimRight(p.id, "abcdefghijklmnopqrstuvwxyz") != name {
				continue
			}
			if found = true; !taken[p.id] {
				taken[p.id] = true
				picked = append(picked, p)
			}
		}
		if !found {
			return nil, fmt.Errorf("figure %q is none of %s", name, strings.Join(ids(all), ", "))
		}
	}
	return picked, nil
}

func ids(all []panel) (names []string) {
	for _, p := range all {
		names = append(names, p.id)
	}
	return names
}

// splits is how many splits FlashDecoding gives a context, as FlashAttention 2.5.6 does, which the
// paper measured: the fewest that keep multiprocessors as busy as 85% of what the best number
// does, where busy is the share of the last wave that is full. outputs are the output tiles.
func splits(outputs, multiprocessors, keys, dim int) int {
	if 5*outputs >= 4*multiprocessors {
		return 1 // busy enough
	}
	block := 256 // tokens of its LeanTile
	switch {
	case dim > 128:
		block = 64
	case dim > 64:
		block = 128
	}
	blocks := (keys + block - 1) / block
	busy := func(n int) float64 {
		if n > 1 && (blocks+n-1)/n == (blocks+n-2)/(n-1) {
			return 0 // no split becomes shorter
		}
		waves := float64(outputs*n) / float64(multiprocessors)
		return waves / float64((outputs*n+multiprocessors-1)/multiprocessors)
	}
	most := min(128, multiprocessors, blocks)
	best := 0.0
	for n := 1; n <= most; n++ {
		best = max(best, busy(n))
	}
	for n := 1; n <= most; n++ {
		if busy(n) >= 0.85*best {
			return n
		}
	}
	return 1
}
