package main

import (
	"context"
	"errors"
	"fmt"
	"math"

	"gorgonia.org/leanattention/decoder/tokenizer"
)

// perplexity tells exp of the mean of -log p over the tokens of a text, in windows of -c tokens side by side. The first token of a
// window has no probability.
func perplexity(ctx context.Context, args []string, std streams) (err error) {
	var m modelFlags
	var file string
	f := newFlags("perplexity", "perplexity tells how well a model predicts a text: exp of the mean of -log p over its tokens, in windows of -c tokens side by side.")
	m.add(f)
	f.text(&file, "f,file", "", "`file` with the text; - is standard input")
	if err := f.parse(args, std); err != nil {
		return err
	}
	if file == "" {
		return usagef("no text: give a file with -f")
	}
	text, err := readText(file, std.in)
	if err != nil {
		return fmt.Errorf("-f: %w", err)
	}
	model, err := m.open()
	if err != nil {
		return err
	}
	defer func() { err = model.end(err) }()
	interrupted := ctx
	if ctx, std, err = m.join(ctx, model, together{f, map[string]string{"text of -f": text}}, std); err != nil {
		return err
	}
	ids, err := model.Tokenizer().Encode(text, tokenizer.Options{})
	if err != nil {
		return fmt.Errorf("-f: %w", err)
	}
	if len(ids) < 2 {
		return fmt.Errorf("-f: the text has %d tokens; a perplexity needs 2", len(ids))
	}
	m.options.Batch = 1
	engine, err := m.engine(model, std)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, engine.Close()) }()
	window := engine.Options().Context
	sum, n := 0.0, 0
	for from := 0; from < len(ids); from += window {
		p, err := engine.LogProbs(ctx, ids[from:min(from+window, len(ids))])
		if err != nil && (n == 0 || !errors.Is(err, context.Canceled)) {
			return err
		} else if err != nil {
			fmt.Fprintf(std.err, "interrupted after %d of %d tokens\n", from, len(ids))
			break
		}
		for _, x := range p {
			sum, n = sum-x, n+1
		}
	}
	_, err = fmt.Fprintf(std.out, "perplexity %.4f of %d tokens in windows of %d\n", math.Exp(sum/float64(n)), n, window)
	return errors.Join(err, interrupted.Err())
}
