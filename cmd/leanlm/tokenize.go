package main

import (
	"context"
	"errors"
	"fmt"

	"gorgonia.org/leanattention/decoder/tokenizer"
)

// tokenize lists the tokens of a text, one a line.
func tokenize(_ context.Context, args []string, std streams) (err error) {
	var m modelFlags
	var text, file string
	var idsOnly, special bool
	f := newFlags("tokenize", "tokenize lists the tokens of a text: the number and the text of each.")
	f.text(&m.path, "m,model", "", "`folder` of the model; without it, a small model that is part of the program")
	f.text(&text, "p,prompt", "", "`text`")
	f.text(&file, "f,file", "", "`file` with the text; - is standard input")
	f.is(&idsOnly, "ids", "write the numbers alone, on one line")
	f.is(&special, "sp,special", "names of special tokens in the text, such as </s>, are these tokens")
	if err := f.parse(args, std); err != nil {
		return err
	}
	if (text == "") == (file == "") {
		return usagef("give a text with -p, or a file with -f")
	}
	if file != "" {
		if text, err = readText(file, std.in); err != nil {
			return fmt.Errorf("-f: %w", err)
		}
	}
	model, err := m.open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, model.Close()) }()
	t := model.Tokenizer()
	ids, err := t.Encode(text, tokenizer.Options{Special: special})
	if err != nil {
		return err
	}
	if idsOnly {
		_, err = fmt.Fprintln(std.out, ids)
		return err
	}
	for _, id := range ids {
		if _, err := fmt.Fprintf(std.out, "%7d %q\n", id, t.Decode([]int{id})); err != nil {
			return err
		}
	}
	return nil
}
