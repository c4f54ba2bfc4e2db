package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/bpe"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/examples/opt/model"
	"gorgonia.org/leanattention/examples/opt/sample"
	"gorgonia.org/leanattention/examples/opt/tiny"
	"gorgonia.org/leanattention/nn"
)

// generate loads the model, reads the prompts and writes what follows.
func generate(ctx context.Context, o options, stdout, stderr io.Writer) (err error) {
	defer limitMemory()()
	fmt.Fprintf(stderr, "loading %s\n", name(o.model))
	began := time.Now()
	folder, tokenizer, err := open(o.model)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, folder.Close()) }()
	c := folder.Config()
	hint := ""
	if o.cache == la.Float16 {
		hint = "; the cache is float16, which has no numbers beyond 65504: -cache bf16 and -cache f32 have"
	}
	b := &batch{hint: hint, eos: folder.EOS(), limit: o.tokens, begin: func() *printer { return newPrinter(stdout, o.prompts) }}
	total := 0
	capacity := make([]int, len(o.prompts))
	for i, prompt := range o.prompts {
		ids, err := tokenizer.EncodeAtMost(prompt, c.MaxPositions, false)
		if errors.Is(err, bpe.ErrTooLong) {
			return fmt.Errorf("prompt %d has more tokens than the model's %d positions", i+1, c.MaxPositions)
		} else if err != nil {
			return fmt.Errorf("prompt %d: %w", i+1, err)
		}
		total += len(ids)
		// The last token that is chosen is not read any more.
		capacity[i] = min(len(ids)+min(o.tokens, c.MaxPositions)-1, c.MaxPositions)

		s := o.sampling
		s.Stream = uint64(i)
		sampler, err := sample.New(s)
		if err != nil {
			return err
		}
		b.sequences = append(b.sequences, sequence{prompt: ids, waiting: -1, room: capacity[i] - len(ids), sampler: sampler, text: tokenizer.NewDecoder()})
	}
	mo := model.Options{Capacity: capacity, Attention: o.attention, Schedule: o.schedule, Linear: o.linear, Cache: o.cache, Workers: o.workers, Greedy: o.sampling.Temperature == 0, Seed: o.sampling.Seed}
	if o.gpu >= 0 {
		if mo.Device, err = la.OpenGPU(o.gpu); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, mo.Device.Close()) }()
		if !mo.Greedy { // where the logits are, so that they need not come down
			choice := nn.Choice{Temperature: o.sampling.Temperature, TopK: o.sampling.TopK, TopP: o.sampling.TopP}
			mo.Choices = slices.Repeat([]nn.Choice{choice}, len(capacity))
		}
	}
	if err := model.CheckRoom(folder, o.weights, mo); err != nil {
		return err
	}
	weights, err := model.LoadAs(folder, o.weights)
	if err != nil {
		return err
	}
	var first firstToken
	first.load = time.Since(began)
	fmt.Fprintf(stderr, "loaded in %.2f s: %d layers of width %d, %d heads, %d positions, %d MB of weights\n",
		first.load.Seconds(), c.Layers, c.HiddenSize, c.Heads, c.MaxPositions, weights.Bytes()>>20)
	began = time.Now()
	if b.decoder, err = weights.NewDecoder(mo); err != nil {
		return err
	}
	first.build = time.Since(began)
	if mo.Device != nil {
		fmt.Fprintf(stderr, "on %v in %.2f s\n", mo.Device, first.build.Seconds())
	}
	b.chosen = mo.Greedy || mo.Choices != nil
	b.ahead = b.chosen && (mo.Device != nil || o.ahead)
	defer func() { err = errors.Join(err, b.decoder.Close()) }()

	b.line = progress{w: stderr, total: total, live: isTerminal(stderr), began: time.Now()}
	err = b.run(ctx)
	b.line.end()
	first.prompt = b.line.first
	if flushed := b.flush(); err == nil {
		err = flushed
	}
	if o.stats {
		first.write(stderr)
		writeStats(stderr, b.decoder.Stats())
		if e := writeReads(stderr, b.decoder); err == nil {
			err = e
		}
		if mo.Device != nil {
			if m, e := mo.Device.Memory(); e == nil {
				fmt.Fprintf(stderr, "memory   %d MB of the GPU used here, %d of %d MB free\n", m.Used>>20, m.Free>>20, m.Total>>20)
			}
		}
	}
	return err
}

// open opens the folder of a model, or without one the program's own.
func open(dir string) (folder *hf.Folder, tokenizer *bpe.Tokenizer, err error) {
	if dir != "" {
		folder, err = hf.Open(dir)
	} else {
		folder, err = hf.OpenFS(name(dir), tiny.Files)
	}
	if err != nil {
		return nil, nil, err
	}
	if dir != "" {
		tokenizer, err = bpe.Load(dir)
	} else {
		tokenizer, err = bpe.LoadFS(name(dir), tiny.Files)
	}
	if err != nil {
		return nil, nil, errors.Join(err, folder.Close())
	}
	return folder, tokenizer, nil
}

func name(dir string) string {
	if dir == "" {
		return "the shipped model"
	}
	return dir
}

// batch is the sequences that are continued together.
type batch struct {
	decoder   *model.Decoder
	chosen    bool   // the decoder chooses
	ahead     bool   // and may be some tokens ahead
	eos       []int  // the tokens that end a text
	hint      string // what may be the reason for logits that are no numbers
	limit     int    // most tokens to add to each
	sequences []sequence
	line      progress
	begin     func() *printer
	out       *printer // from the first token on
}

type sequence struct {
	prompt  []int // that was not read yet
	waiting int   // a token that was chosen and found no room in a pass; -1: none
	room    int   // tokens that can still be appended
	added   int
	sampler *sample.Sampler
	text    *bpe.Decoder
	done    bool
}

// run reads the prompts, and adds tokens until every sequence has come to a token
// that ends it, to
// its number of tokens or to the model's last position. One that has rests. As long
// as prompts are read, sequences that are done with theirs go on beside them.
func (b *batch) run(ctx context.Context) error {
	next, prompts := make([]int, len(b.sequences)), make([][]int, len(b.sequences))
	var ahead [][]int // tokens that have been chosen and appended already
	for {
		var now []int
		if len(ahead) > 0 {
			now, ahead = ahead[0], ahead[1:]
		}
		live, reading, burst := 0, 0, mostAhead
		for i := range b.sequences {
			s := &b.sequences[i]
			next[i], prompts[i] = s.waiting, s.prompt
			switch {
			case s.done:
				continue
			case len(s.prompt) > 0:
				reading++
				continue
			case s.waiting >= 0:
				live++
				burst = min(burst, s.room+1, b.limit-s.added)
				continue
			}
			if b.out == nil {
				b.line.rest()
				b.out = b.begin()
			}
			id, err := b.choose(i, now)
			if err != nil {
				return fmt.Errorf("after token %d of text %d: %w%s", b.decoder.Len(i), i+1, err, b.hint)
			}
			ends := slices.Contains(b.eos, id)
			if !ends {
				s.added++
				if err := b.out.add(i, s.text.Add(id)); err != nil {
					return err
				}
			}
			if ends || s.added == b.limit || s.room == 0 {
				if err := b.end(i); err != nil {
					return err
				}
				continue
			}
			s.room--
			next[i] = id
			live++
			burst = min(burst, s.room+1, b.limit-s.added)
		}
		if live+reading == 0 {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		var err error
		switch {
		case len(ahead) > 0:
		case reading > 0:
			err = b.mix(next, prompts)
		case b.ahead && live == len(next):
			ahead, err = b.decoder.Continue(next, burst)
		default:
			err = b.decoder.Step(next)
		}
		if err != nil {
			return err
		}
		if reading == 0 { // all have had room
			for i := range b.sequences {
				b.sequences[i].waiting = -1
			}
		}
	}
}

// mix is a pass for prompts and tokens.
func (b *batch) mix(next []int, prompts [][]int) error {
	taken, err := b.decoder.Mix(next, prompts)
	if err != nil {
		return err
	}
	read, ready := 0, false
	for i, n := range taken {
		s := &b.sequences[i]
		switch {
		case len(s.prompt) > 0:
			s.prompt = s.prompt[n:]
			read, ready = read+n, ready || len(s.prompt) == 0
		case n > 0:
			s.waiting = -1
		default:
			s.waiting = next[i]
		}
	}
	b.line.show(read, ready)
	return nil
}

// mostAhead is how many tokens are computed before one is looked at, where that
// is faster: not so many that a reader would see it.
const mostAhead = 8

// choose is the next token of a sequence: of those that have been chosen, if any
// have.
func (b *batch) choose(i int, chosen []int) (int, error) {
	if !b.chosen {
		return b.sequences[i].sampler.Next(b.decoder.Logits(i))
	}
	id := b.decoder.Chosen(i)
	if chosen != nil {
		id = chosen[i]
	}
	if id < 0 {
		return 0, fmt.Errorf("%w: a NaN or an infinity", sample.ErrLogits)
	}
	return id, nil
}

func (b *batch) end(i int) error {
	s := &b.sequences[i]
	s.done = true
	if err := b.out.add(i, s.text.Flush()); err != nil {
		return err
	}
	return b.out.end(i)
}

// flush writes what there is of texts that were broken off.
func (b *batch) flush() error {
	if b.out == nil {
		return nil
	}
	for i := range b.sequences {
		if !b.sequences[i].done {
			if err := b.end(i); err != nil {
				return err
			}
		}
	}
	return nil
}

// progress tells on one line how far the prompts are.
type progress struct {
	w           io.Writer
	total, done int
	live        bool // w shows a line that is written over
	ended       bool
	resting     bool // a text is being written, perhaps on the same terminal
	began       time.Time
	first, took time.Duration // until a first prompt was read, and until the last one
}

// show tells that some more tokens were read, the last of a prompt if ready.
func (p *progress) show(tokens int, ready bool) {
	if p.done += tokens; tokens > 0 {
		p.took = time.Since(p.began)
	}
	if ready && p.first == 0 {
		p.first = p.took
	}
	switch {
	case p.resting:
	case p.done == p.total:
		p.end()
	case p.live:
		fmt.Fprintf(p.w, "\rprompt: %d of %d tokens", p.done, p.total)
	}
}

// rest makes room for texts: what is not written yet waits for end.
func (p *progress) rest() {
	if p.live && !p.ended {
		fmt.Fprintln(p.w)
	}
	p.resting = true
}

// end writes how far it came, once.
func (p *progress) end() {
	if p.ended {
		return
	}
	p.ended = true
	if p.live {
		fmt.Fprint(p.w, "\r")
	}
	fmt.Fprintf(p.w, "prompt: %d of %d tokens in %.2f s\n", p.done, p.total, p.took.Seconds())
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// firstToken is what the first token of a cold start waits for.
type firstToken struct{ load, build, prompt time.Duration }

func (t *firstToken) write(w io.Writer) {
	fmt.Fprintf(w, "first    token after %.3f s: %.3f loading, %.3f for graphs and copies of weights, %.3f for a prompt\n",
		(t.load + t.build + t.prompt).Seconds(), t.load.Seconds(), t.build.Seconds(), t.prompt.Seconds())
}

func writeStats(w io.Writer, s model.Stats) {
	if s.Device != "" {
		fmt.Fprintf(w, "device   %s\n", s.Device)
	}
	for _, p := range []struct {
		name string
		model.Phase
	}{{"prefill", s.Prefill}, {"decode", s.Decode}} {
		if p.Tokens == 0 {
			fmt.Fprintf(w, "%-7s  no tokens\n", p.name)
			continue
		}
		seconds := p.Time.Seconds()
		fmt.Fprintf(w, "%-7s  %d tokens in %.3f s: %.1f tokens/s, %.3f ms a token, attention %.1f%%",
			p.name, p.Tokens, seconds, float64(p.Tokens)/seconds, 1e3*seconds/float64(p.Tokens), 100*p.Attention.Seconds()/seconds)
		fmt.Fprintf(w, " (%d runs of the graph, %.3f ms each)\n", p.Passes, 1e3*seconds/float64(p.Passes))
	}
}

// writeReads tells how much of the memory's speed decoding got.
func writeReads(w io.Writer, d *model.Decoder) error {
	p := d.Stats().Decode
	if p.Bytes == 0 {
		return nil
	}
	speed := float64(p.Bytes) / p.Time.Seconds()
	fmt.Fprintf(w, "reads    %.1f MB a run of decode, %.1f GB/s", float64(p.Bytes)/float64(p.Passes)/1e6, speed/1e9)
	ceiling, err := d.ReadCeiling()
	if ceiling > 0 {
		fmt.Fprintf(w, ": %.1f%% of the %.1f GB/s of their memory", 100*speed/ceiling, ceiling/1e9)
	}
	fmt.Fprintln(w)
	return err
}
