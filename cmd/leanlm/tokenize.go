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
	var idsOnly, parse, special bool
	f := newFlags("tokenize", "tokenize lists the tokens of a text: the number and the text of each.")
	f.text(&m.path, "m,model", "", "`folder` of the model; without it, a small model that is part of the program")
	f.text(&text, "p,prompt", "", "`text`")
	f.text(&file, "f,file", "", "`file` with the text; - is standard input")
	f.is(&idsOnly, "ids", "write the numbers alone, on one line")
	f.is(&parse, "parse-special", "names of special tokens in the text, such as </s>, are these tokens")
	f.is(&special, "sp,special", "list special tokens with their names, and not with an empty text")
	if err := f.parse(args, std); err != nil {
		return err
	}
	if idsOnly && special {
		return usagef("-special is for names in the list, and -ids writes no list")
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
	ids, err := t.Encode(text, tokenizer.Options{Special: parse})
	if err != nil {
		return err
	}
	if idsOnly {
		_, err = fmt.Fprintln(std.out, ids)
		return err
	}
	for _, id := range ids {
		if _, err := fmt.Fprintf(std.out, "%7d %q\n", id, decodeToken(model, id, special)); err != nil {
			return err
		}
	}
	return nil
}
