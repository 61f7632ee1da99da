"""Verbs, one row each.

Columns: English base, past and -ing form; Northern Sotho present and perfect; Malay; kinds of
subjects and of objects (``*``: all, ``-``: intransitive). On the second line: Tagalog completed,
incompleted and contemplated aspect and infinitive. On the third: Catalan infinitive and present
tense (first, second and third person singular, first and third person plural).

Tagalog forms focus on the object where there is one, because a definite object has to be the topic
of its sentence, and on the actor otherwise.
"""

from smoe_fairseq.recipes.phrasebook.entries import Verb, read

_WITH_OBJECT = """
read read reading  bala badile  membaca  person text \
    binasa binabasa babasahin basahin \
    llegir llegeixo,llegeixes,llegeix,llegim,llegeixen
write wrote writing  ngwala ngwadile  menulis  person text \
    isinulat isinusulat isusulat isulat \
    escriure escric,escrius,escriu,escrivim,escriuen
buy bought buying  reka rekile  membeli  person thing,food,drink,animal \
    binili binibili bibilhin bilhin \
    comprar compro,compres,compra,comprem,compren
sell sold selling  rekiša rekišitše  menjual  person thing,food,drink,animal \
    ibinenta ibinebenta ibebenta ibenta \
    vendre venc,vens,ven,venem,venen
carry carried carrying  rwala rwele  membawa  person thing,food,drink \
    binuhat binubuhat bubuhatin buhatin \
    portar porto,portes,porta,portem,porten
eat ate eating  ja jele  makan  person,animal food \
    kinain kinakain kakainin kainin \
    menjar menjo,menges,menja,mengem,mengen
drink drank drinking  nwa nwele  minum  person,animal drink \
    ininom iniinom iinumin inumin \
    beure bec,beus,beu,bevem,beuen
cook cooked cooking  apea apeile  memasak  person food \
    niluto niluluto lulutuin lutuin \
    cuinar cuino,cuines,cuina,cuinem,cuinen
look_at looked_at looking_at  lebelela lebeletše  melihat  person,animal * \
    tiningnan tinitingnan titingnan tingnan \
    mirar miro,mires,mira,mirem,miren
clean cleaned cleaning  hlwekiša hlwekišitše  membersihkan  person thing,opening,building \
    nilinis nililinis lilinisin linisin \
    netejar netejo,neteges,neteja,netegem,netegen
open opened opening  bula butše  membuka  person opening \
    binuksan binubuksan bubuksan buksan \
    obrir obro,obres,obre,obrim,obren
close closed closing  tswalela tswaletše  menutup  person opening \
    isinara isinasara isasara isara \
    tancar tanco,tanques,tanca,tanquem,tanquen
hide hid hiding  fihla fihlile  menyembunyikan  person thing,food \
    itinago itinatago itatago itago \
    amagar amago,amagues,amaga,amaguem,amaguen
break broke breaking  pšhatla pšhatlile  memecahkan  person fragile \
    binasag binabasag babasagin basagin \
    trencar trenco,trenques,trenca,trenquem,trenquen
build built building  aga agile  membina  person building \
    itinayo itinatayo itatayo itayo \
    construir construeixo,construeixes,construeix,construïm,construeixen
draw drew drawing  thala thadile  melukis  person person,animal,thing,building,plant \
    iginuhit iginuguhit iguguhit iguhit \
    dibuixar dibuixo,dibuixes,dibuixa,dibuixem,dibuixen
paint painted painting  penta pentile  mengecat  person solid,opening,building \
    pininturahan pinipinturahan pipinturahan pinturahan \
    pintar pinto,pintes,pinta,pintem,pinten
repair repaired repairing  lokiša lokišitše  membaiki  person solid,opening,building \
    inayos inaayos aayusin ayusin \
    reparar reparo,repares,repara,reparem,reparen
call called calling  bitša biditše  memanggil  person person,animal \
    tinawag tinatawag tatawagin tawagin \
    cridar crido,crides,crida,cridem,criden
help helped helping  thuša thušitše  membantu  person person,animal \
    tinulungan tinutulungan tutulungan tulungan \
    ajudar ajudo,ajudes,ajuda,ajudem,ajuden
visit visited visiting  etela etetše  melawat  person person \
    binisita binibisita bibisitahin bisitahin \
    visitar visito,visites,visita,visitem,visiten
wait_for waited_for waiting_for  emela emetše  menunggu  person,animal person \
    hinintay hinihintay hihintayin hintayin \
    esperar espero,esperes,espera,esperem,esperen
greet greeted greeting  dumediša dumedišitše  menyapa  person person \
    binati binabati babatiin batiin \
    saludar saludo,saludes,saluda,saludem,saluden
follow followed following  latela latetše  mengikuti  person,animal person,animal \
    sinundan sinusundan susundan sundan \
    seguir segueixo,segueixes,segueix,seguim,segueixen
feed fed feeding  fepa fepile  memberi_makan  person animal \
    pinakain pinapakain papakainin pakainin \
    alimentar alimento,alimentes,alimenta,alimentem,alimenten
"""

_WITHOUT_OBJECT = """
sleep slept sleeping  robala robetše  tidur  person,animal - \
    natulog natutulog matutulog matulog \
    dormir dormo,dorms,dorm,dormim,dormen
work worked working  šoma šomile  bekerja  person - \
    nagtrabaho nagtatrabaho magtatrabaho magtrabaho \
    treballar treballo,treballes,treballa,treballem,treballen
dance danced dancing  bina binne  menari  person - \
    sumayaw sumasayaw sasayaw sumayaw \
    ballar ballo,balles,balla,ballem,ballen
sing sang singing  opela opetše  menyanyi  person - \
    kumanta kumakanta kakanta kumanta \
    cantar canto,cantes,canta,cantem,canten
run ran running  kitima kitimile  berlari  person,animal - \
    tumakbo tumatakbo tatakbo tumakbo \
    córrer corro,corres,corre,correm,corren
walk walked walking  sepela sepetše  berjalan  person,animal - \
    naglakad naglalakad maglalakad maglakad \
    caminar camino,camines,camina,caminem,caminen
cry cried crying  lla llile  menangis  person - \
    umiyak umiiyak iiyak umiyak \
    plorar ploro,plores,plora,plorem,ploren
laugh laughed laughing  sega segile  ketawa  person - \
    tumawa tumatawa tatawa tumawa \
    riure ric,rius,riu,riem,riuen
play played playing  raloka ralokile  bermain  person,animal - \
    naglaro naglalaro maglalaro maglaro \
    jugar jugo,jugues,juga,juguem,juguen
rest rested resting  khutša khuditše  berehat  person,animal - \
    nagpahinga nagpapahinga magpapahinga magpahinga \
    descansar descanso,descanses,descansa,descansem,descansen
swim swam swimming  rutha ruthile  berenang  person - \
    lumangoy lumalangoy lalangoy lumangoy \
    nedar nedo,nedes,neda,nedem,neden
speak spoke speaking  bolela boletše  bercakap  person - \
    nagsalita nagsasalita magsasalita magsalita \
    parlar parlo,parles,parla,parlem,parlen
study studied studying  ithuta ithutile  belajar  person - \
    nag-aral nag-aaral mag-aaral mag-aral \
    estudiar estudio,estudies,estudia,estudiem,estudien
"""

VERBS: dict[str, Verb] = read(_WITH_OBJECT + _WITHOUT_OBJECT, Verb)
