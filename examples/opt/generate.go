package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/examples/opt/model"
	"gorgonia.org/leanattention/internal/plural"
)

// generate loads the model, reads the prompts and writes their continuations.
func generate(ctx context.Context, o options, stdout, stderr io.Writer) (err error) {
	l, err := load(o, stderr)
	if err != nil {
		return err
	}
	defer func() { err = l.end(err) }()

	var texts []string // prompt of each text
	var prompts [][]int
	var left []int // tokens that can be appended to each text
	mo := model.Options{Draft: o.draftTokens()}
	for i, prompt := range o.prompts {
		ids, err := l.encode(prompt, true, l.config.MaxPositions)
		switch {
		case errors.Is(err, tokenizer.ErrTooLong):
			return fmt.Errorf("prompt %d has %s, and the model has %d positions: shorten it", i+1, l.count(prompt, true), l.config.MaxPositions)
		case err != nil:
			return fmt.Errorf("prompt %d: %w", i+1, err)
		case len(ids) == 0:
			return fmt.Errorf("prompt %d has no tokens: nothing comes before what is to follow", i+1)
		}
		// The last chosen token is not read.
		capacity := min(len(ids)+min(o.tokens, l.config.MaxPositions)-1, l.config.MaxPositions)
		for range o.samples {
			texts, prompts, left = append(texts, prompt), append(prompts, ids), append(left, capacity-len(ids))
			mo.Capacity = append(mo.Capacity, capacity)
		}
	}
	begin := make([]model.Shared, len(prompts))
	if o.paged() {
		begin = shared(prompts)
		mo.Shared = slices.Clone(begin)
	}
	total := 0
	for i, ids := range prompts {
		total += len(ids) - begin[i].Tokens
	}
	var cached *cachedPrompt
	if o.promptCache != "" {
		if cached, err = l.openPromptCache(prompts[0]); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, cached.Close()) }()
		mo.Capacity[0] = max(mo.Capacity[0], cached.capacity())
	}
	o.choose(&mo)
	b := l.newBatch(&mo)
	b.begin = func() output { return newPrinter(stdout, texts) }
	if o.json {
		b.begin = func() output { return silent{} }
	}
	for i, ids := range prompts {
		s, err := l.newSequence(i, ids, begin[i].Tokens, left[i])
		if err != nil {
			return err
		}
		s.shared = begin[i]
		b.sequences = append(b.sequences, s)
	}
	if err := l.build(mo, stderr); err != nil {
		return err
	}
	b.decoder = l.decoder
	if cached != nil {
		if b.sequences[0].prompt, err = cached.load(); err != nil {
			return err
		}
		total -= cached.common
		fmt.Fprint(stderr, plural.Mend(fmt.Sprintf("prompt cache: %d of %d tokens\n", cached.common, len(prompts[0]))))
	}

	b.line = progress{w: stderr, what: "prompt", total: total, live: isTerminal(stderr), began: time.Now()}
	err = b.run(ctx)
	b.line.end()
	l.first.prompt = b.line.first
	b.tellFull(stderr, l.config.MaxPositions)
	if e := b.interrupt(); err == nil { // also after an error: the texts so far are written
		err = e
	}
	if cached != nil && (err == nil || errors.Is(err, context.Canceled)) {
		if e := cached.save(); e != nil {
			return e
		}
	}
	if err == nil {
		err = l.measureExchange()
	}
	if o.json && (err == nil || errors.Is(err, context.Canceled)) {
		report := l.newReport()
		for i := range b.sequences {
			text := l.newText(texts[i], prompts[i], &b.sequences[i].result)
			text.Shared = begin[i].Tokens
			report.Texts = append(report.Texts, text)
		}
		if cached != nil {
			report.Texts[0].Cached = cached.common
		}
		if e := report.write(stdout); e != nil {
			return e
		}
	}
	if o.stats {
		if e := l.writeStats(stderr); err == nil {
			err = e
		}
	}
	return err
}
