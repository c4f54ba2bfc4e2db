package gpu

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// Shape is one decode step: a query of every head of every sequence, in
// float16.
type Shape struct {
	name           string // of a ragged batch
	heads, kvHeads int
	dim            int
	lengths        []int // keys of each sequence
}

func EvenShape(batch, heads, kvHeads, keys, dim int) Shape {
	return Shape{heads: heads, kvHeads: kvHeads, dim: dim, lengths: slices.Repeat([]int{keys}, batch)}
}

func (s Shape) batch() int { return len(s.lengths) }

// even says whether all sequences are as long as the first.
func (s Shape) even() bool { return slices.Max(s.lengths) == slices.Min(s.lengths) }

func (s Shape) keys() (n int64) {
	for _, l := range s.lengths {
		n += int64(l)
	}
	return n
}

// Bytes is the size of keys and values, which a step reads once.
func (s Shape) Bytes() int64 { return 2 * s.keys() * int64(s.kvHeads*s.dim) * 2 }

// pages are those of a page size that the keys take.
func (s Shape) pages(tokens int) (n int64) {
	for _, l := range s.lengths {
		n += int64((l + tokens - 1) / tokens)
	}
	return n
}

// Region is the size of memory for keys and values however they lie: in pages of
// up to 64 tokens they take a little more.
func (s Shape) Region() int64 {
	return max(s.pages(64)*64, s.pages(16)*16) * int64(s.kvHeads*s.dim) * 2 * 2
}

func (s Shape) String() string {
	heads := fmt.Sprint(s.heads)
	if s.kvHeads != s.heads {
		heads += fmt.Sprintf("/%d", s.kvHeads)
	}
	if s.name != "" {
		return fmt.Sprintf("%s, %s heads of %d", s.name, heads, s.dim)
	}
	return fmt.Sprintf("b%d, %s heads x %d x %d", s.batch(), heads, s.lengths[0], s.dim)
}

// gpuRotation is what the operands of a graph's launches come to at least: some
// times the L2 cache. It is a variable for tests, which have an emulated GPU.
var gpuRotation int64 = 200 << 20

// gpuGraph is what a graph's launches read together at least, unless they are 20:
// beside so many bytes the time that a graph takes to begin is nothing.
const gpuGraph int64 = 40e9

// Sets is the number of operands that take turns, and launches the number of
// launches of a graph, a multiple of it.
func (s Shape) Sets() int { return int((gpuRotation + s.Region() - 1) / s.Region()) }

// rotation is how many bytes they take together.
func (s Shape) rotation() int64 { return int64(s.Sets()) * s.Region() }

func (s Shape) Launches() int {
	n := s.Sets()
	least := min(20, max(4, int((gpuGraph+s.Bytes()-1)/s.Bytes())))
	return (least + n - 1) / n * n
}

// gpuCase is a case of a table.
type gpuCase struct {
	table   string
	shape   Shape
	share   *measure.Bar // of the ceiling
	micros  *measure.Bar // of a launch
	flash   *measure.Bar // times as fast as FLASH_ATTENTION
	paged   *measure.Bar // share of the speed with contiguous keys
	ragged  *measure.Bar // of the time that is allowed
	best    *measure.Bar // of a ragged batch: times as fast as the best peer
	batch   *measure.Bar // and as FlashInfer's BatchAttention
	pages   []int
	groups  []int        // query heads a KV head that are compared with one
	grouped *measure.Bar // time over that of one query head a KV head
}

const (
	tableNamed  = "Shapes by name"
	tableSweep  = "Sweep"
	tableRagged = "Ragged batches, in pages"
	tableGroups = "Grouped queries against one query head a KV head, the same keys and values"

	longBytes = 300e6 // keys and values from which on only memory counts
)

func evenCase(table string, shape Shape) gpuCase {
	c := gpuCase{table: table, shape: shape, pages: []int{16, 64}, paged: measure.AtLeast(0.97)}
	if shape.heads == shape.kvHeads && shape.Bytes() >= longBytes {
		c.share = measure.OfCeiling(0.98)
	}
	return c
}

// namedCases are in every measurement.
func namedCases() (cases []gpuCase) {
	add := func(shape Shape) *gpuCase {
		cases = append(cases, evenCase(tableNamed, shape))
		return &cases[len(cases)-1]
	}
	for _, keys := range []int{4096, 16384, 65536} {
		add(EvenShape(6, 48, 48, keys, 64)).flash = measure.AtLeast(2.9)
	}
	add(EvenShape(1, 32, 32, 1024, 64)).micros = measure.AtMost(7)
	add(EvenShape(1, 32, 8, 8192, 128)).micros = measure.AtMost(13)
	add(EvenShape(16, 32, 8, 1024, 128)).micros = measure.AtMost(18)
	add(EvenShape(16, 32, 8, 8192, 128))
	add(EvenShape(64, 64, 8, 4096, 128))
	add(EvenShape(1, 1, 1, 1<<20, 64)).share = measure.OfCeiling(0.90)
	return cases
}

// raggedCases are batches of lengths that differ much.
func raggedCases() []gpuCase {
	one := append([]int{131072}, slices.Repeat([]int{1024}, 31)...)
	harmonic := make([]int, 64)
	for i := range harmonic {
		harmonic[i] = max(16, 65536/(i+1))
	}
	cases := []gpuCase{
		{shape: Shape{name: "A: 131072 and 31 x 1024", heads: 32, kvHeads: 32, dim: 128, lengths: one}},
		{shape: Shape{name: "B: 131072 and 31 x 1024", heads: 32, kvHeads: 8, dim: 128, lengths: one}},
		{shape: Shape{name: "C: 65536/i, i = 1 ... 64", heads: 32, kvHeads: 8, dim: 128, lengths: harmonic}},
	}
	for i := range cases {
		cases[i].table, cases[i].pages, cases[i].ragged, cases[i].best = tableRagged, []int{16, 64}, measure.AtMost(1), measure.AtLeast(1)
	}
	cases[0].best, cases[1].batch = measure.AtLeast(3), measure.AtLeast(1.2)
	return cases
}

// groupCases have 8 KV heads, and 8 times the group of query heads.
func groupCases() (cases []gpuCase) {
	for _, shape := range []Shape{EvenShape(4, 8, 8, 16384, 128), EvenShape(8, 8, 8, 16384, 64)} {
		cases = append(cases, gpuCase{table: tableGroups, shape: shape, groups: []int{2, 4, 5, 7, 8, 16}, grouped: measure.AtMost(1.03)})
	}
	return cases
}

// sweepCases are all shapes between single sequences and large batches, but those
// that have names.
func sweepCases() (cases []gpuCase) {
	named := make(map[string]bool)
	for _, c := range namedCases() {
		named[c.shape.String()] = true
	}
	for _, batch := range []int{1, 4, 6, 16, 64} {
		for _, heads := range []int{8, 32, 40, 48, 56, 64} {
			for _, kvHeads := range slices.Compact([]int{8, heads}) {
				for keys := 1024; keys <= 256<<10; keys *= 4 {
					for _, dim := range []int{64, 128} {
						shape := EvenShape(batch, heads, kvHeads, keys, dim)
						if !named[shape.String()] {
							cases = append(cases, evenCase(tableSweep, shape))
						}
					}
				}
			}
		}
	}
	return cases
}

// cost is about how long a case takes. It knows no machine, so that the same
// cases are measured everywhere.
func (c gpuCase) cost() time.Duration {
	const overhead, contenders, bytesASecond = 0.4, 10, 3e12
	step := max(float64(c.shape.Bytes())/bytesASecond, 6e-6)
	graph := step * float64(c.shape.Launches())
	rounds := float64(c.rounds())
	turn := max(2*graph, gpuTurn.Seconds())
	return time.Duration((overhead + contenders*rounds*turn) * float64(time.Second))
}

// rounds are fewer where a step takes so long that it varies little.
func (c gpuCase) rounds() int {
	if c.shape.Bytes() > 4<<30 {
		return 3
	}
	return 5
}

// gpuPart is one of as many parts of the shapes. The zero value is all of them.
type gpuPart struct{ which, parts int }

func (p *gpuPart) String() string {
	if p.parts == 0 {
		return ""
	}
	return fmt.Sprintf("%d/%d", p.which, p.parts)
}

// Set makes gpuPart a flag.
func (p *gpuPart) Set(text string) error {
	which, parts, ok := strings.Cut(text, "/")
	k, errK := strconv.Atoi(which)
	n, errN := strconv.Atoi(parts)
	if !ok || errK != nil || errN != nil || k < 1 || k > n {
		return fmt.Errorf("%q is not K/N with K from 1 to N", text)
	}
	*p = gpuPart{k, n}
	return nil
}

// first says whether the part has what is not shared out among them.
func (p gpuPart) first() bool { return p.which <= 1 }

// of shares cases out, the same at every call: every part has small and large
// ones of each kind.
func (p gpuPart) of(cases []gpuCase) (mine []gpuCase) {
	if p.parts <= 1 {
		return cases
	}
	for i, at := range rand.New(rand.NewPCG(2, 2)).Perm(len(cases)) {
		if at%p.parts+1 == p.which {
			mine = append(mine, cases[i])
		}
	}
	return mine
}

// within picks cases that take so long together, the same at every call, and
// in their order.
func within(cases []gpuCase, budget time.Duration) (picked []gpuCase) {
	var which []int
	for _, i := range rand.New(rand.NewPCG(1, 1)).Perm(len(cases)) {
		// One large case must not take the place of many others.
		if cost := cases[i].cost(); cost <= budget && cost <= 5*time.Second {
			budget -= cost
			which = append(which, i)
		}
	}
	slices.Sort(which)
	for _, i := range which {
		picked = append(picked, cases[i])
	}
	return picked
}
