package main

import (
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"regexp"
	"time"
)

// cpuBench measures attention on this machine's cores: how much of the memory's
// speed it reaches, and how many times as fast as Gorgonia's own nodes it is.
func cpuBench(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	o := measureFlags(flags)
	only := flags.String("only", "", "measure only the shapes in whose names this `pattern` is found, as \"f16, 32/4\"")
	return func(stdout, stderr io.Writer) error {
		pattern, err := regexp.Compile(*only)
		if err != nil {
			return fmt.Errorf("-only: %w", err)
		}
		m, err := thisMachine(o.workers)
		if err != nil {
			return err
		}
		b := &attentionBench{
			report: &report{Command: "cpu", Machine: m, Figures: []figure{}}, pace: o.pace(), stdout: stdout, stderr: stderr,
			rng: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())),
		}
		if err := b.cpu(pattern); err != nil {
			return err
		}
		return b.report.save(o.json)
	}
}

// measureOptions are the flags of every command that measures.
type measureOptions struct {
	json    string
	quick   bool
	workers int
}

func measureFlags(flags *flag.FlagSet) *measureOptions {
	o := new(measureOptions)
	flags.StringVar(&o.json, "json", "", "`file` to write every figure to, with its bar")
	flags.BoolVar(&o.quick, "quick", false, "few and short turns: figures that are less certain")
	flags.IntVar(&o.workers, "workers", 2, "`threads` that compute")
	return o
}

// pace is that of steps which take micro- or milliseconds.
func (o *measureOptions) pace() pace {
	if o.quick {
		return pace{rounds: 3, turn: 20 * time.Millisecond}
	}
	return pace{rounds: 11, turn: 120 * time.Millisecond}
}

// memorySize is what keys and values come to where the speed of memory is
// meant, in one step or in all of a rotation: many times any cache.
const memorySize = 256 << 20

// attentionBench measures decode shapes one after the other.
type attentionBench struct {
	report         *report
	pace           pace
	stdout, stderr io.Writer
	rng            *rand.Rand
	arena          *arena // of the last element type
}

// one is a case of a table.
type one struct {
	table   string
	shape   decodeShape
	inCache bool // the same operands in every step; else they rotate
	stock   bool // with the default node
	share   *bar // of Attend and of the node
	faster  *bar // than the default node, of both
	allocs  *bar // of Attend
}

const (
	tableMemory  = "Keys and values of 256 MB and more"
	tableCache   = "12 heads x 1024 x 64, the same keys and values in every step"
	tableContext = "Contexts, 12 heads of 64, keys and values from memory"
)

// cpu measures the shapes whose names match only.
func (b *attentionBench) cpu(only *regexp.Regexp) error {
	b.report.writeHead(b.stdout)
	found := false
	for _, table := range []struct {
		name  string
		cases []one
	}{{tableMemory, memoryCases()}, {tableCache, cacheCases()}, {tableContext, contextCases()}} {
		some := false
		for _, c := range table.cases {
			if !only.MatchString(c.shape.String()) {
				continue
			}
			some = true
			c.table = table.name
			fmt.Fprintf(b.stderr, "%s: %s\n", c.table, c.shape)
			if err := b.measure(c); err != nil {
				return fmt.Errorf("%s: %w", c.shape, err)
			}
		}
		if some {
			found = true
			b.report.writeTable(b.stdout, table.name)
		}
	}
	if !found {
		return fmt.Errorf("-only %v: no shape has such a name", only)
	}
	b.report.writeVerdict(b.stdout)
	return nil
}

// memoryCases are steps that read 256 MB each.
func memoryCases() (cases []one) {
	for _, s := range storages {
		for _, heads := range [][2]int{{32, 32}, {32, 8}, {32, 4}} {
			for _, dim := range []int{64, 128} {
				shape := decodeShape{heads: heads[0], kvHeads: heads[1], keys: 1, dim: dim, storage: s}
				shape.keys = memorySize / shape.bytes()
				least := 0.85
				switch {
				case shape.heads != shape.kvHeads:
					least = 0.80
				case s == storeF32:
					least = 0.90
				}
				cases = append(cases, one{shape: shape, stock: s == storeF32, share: ofCeiling(least)})
			}
		}
	}
	return cases
}

// cacheCases are the size that a Gorgonia user is likely to have.
func cacheCases() (cases []one) {
	for _, s := range storages {
		c := one{shape: decodeShape{12, 12, 1024, 64, s}, inCache: true, allocs: atMost(0)}
		if s == storeF32 {
			c.stock, c.faster = true, atLeast(8)
		}
		cases = append(cases, c)
	}
	return cases
}

// contextCases are a ladder of contexts.
func contextCases() (cases []one) {
	for _, s := range storages {
		for keys := 128; keys <= 65536; keys *= 2 {
			cases = append(cases, one{shape: decodeShape{12, 12, keys, 64, s}, stock: s == storeF32})
		}
	}
	return cases
}

// operands are those of a case. Arenas of several element types at once would
// need memory that not every machine has.
func (b *attentionBench) operands(c one) []operands {
	size, most := max(memorySize, c.shape.bytes()), math.MaxInt
	if c.inCache {
		size, most = c.shape.bytes(), 1
	}
	if b.arena == nil || b.arena.storage != c.shape.storage || 8*len(b.arena.words) < size {
		b.arena = nil // its memory may be needed
		b.arena = newArena(c.shape.storage, size, b.rng)
	}
	return b.arena.carve(c.shape, most)
}

func (b *attentionBench) measure(c one) error {
	sets, q := b.operands(c), newQuery(c.shape, b.rng)
	inNode, err := leanNode(c.shape, q, sets)
	if err != nil {
		return err
	}
	attenders := []attender{attend(c.shape, q, sets), inNode}
	if c.stock {
		stock, err := stockNode(c.shape, q, sets)
		if err != nil {
			return err
		}
		attenders = append(attenders, stock)
	}
	if err := agree(attenders); err != nil {
		return err
	}
	contenders := []contender{ceiling(sets)}
	for _, a := range attenders {
		contenders = append(contenders, a.contender)
	}
	all, err := alternate(b.pace, contenders)
	if err != nil {
		return err
	}
	for i, s := range all {
		r := b.report.row(c.table, c.shape.String(), contenders[i].name)
		bytes := float64(c.shape.bytes())
		r.add(speed, bytes/s.median()/1e9, nil)
		r.add(bestSpeed, bytes/s.best()/1e9, nil)
		if i == 0 {
			continue
		}
		lean := i <= 2
		r.add(share, s.faster(all[0]), only(lean, c.share))
		if lean && c.stock {
			r.add(overStock, s.faster(all[3]), c.faster)
		}
		// Few steps do where one takes long: what a step allocates does not vary.
		steps := min(max(int(b.pace.turn.Seconds()/s.median()), 2), 100)
		n, err := allocations(contenders[i], steps)
		if err != nil {
			return err
		}
		r.add(allocs, n, only(i == 1, c.allocs))
	}
	return nil
}

func only(when bool, b *bar) *bar {
	if !when {
		return nil
	}
	return b
}
